"""The threads: targets that make blocks, drafters that train on them."""

from __future__ import annotations

import math
import queue
import random
from dataclasses import dataclass, field
from typing import Callable

from .at_work import AtWork
from .data import Row, Sampler
from .exchange import Averaged, Exchange
from .model import Block, Parameters, StepOutput, add, forward_backward
from .optimizer import AdamW, learning_rate, norm
from .settings import Settings, Training
from .target import Target
from .team import Team

QUEUE_ROOM = 2


@dataclass(frozen=True)
class Batch:
    """One forward-backward's input: blocks and the ids of the rows they came from."""

    blocks: list[Block]
    rows: list[int]


@dataclass(frozen=True)
class StepReport:
    """What one drafter tells the coordinator about a step."""

    averaged: Averaged
    grad_norm: float
    learning_rate: float
    rows: list[int]
    wait_s: float


@dataclass(frozen=True)
class Seen:
    """What the canary looks at: the batch, the parameters before, and what the worker computed from them."""

    blocks: list[Block]
    before: Parameters
    output: StepOutput
    averaged: Averaged
    after: Parameters


def decay_gamma(training: Training, block_size: int) -> float:
    """Return gamma of w_k = exp(-(k - 1) / gamma): the paper's values, linear between them."""
    if training.decay_gamma is not None:
        return training.decay_gamma
    known = [(8, 4.0), (10, 5.0), (16, 7.0)]
    if block_size <= known[0][0]:
        return known[0][1]
    for (low, at_low), (high, at_high) in zip(known, known[1:]):
        if block_size <= high:
            return at_low + (at_high - at_low) * (block_size - low) / (high - low)
    return known[-1][1]


def make_blocks(row: Row, anchors: list[int], target: Target, block_size: int, gamma: float) -> list[Block]:
    """Build one block an anchor; labels beyond the row or outside the answer weigh nothing."""
    blocks = []
    for anchor in anchors:
        labels = []
        for slot in range(1, block_size):
            at = anchor + slot
            counts = at < len(row.input_ids) and row.loss_mask[at]
            labels.append((row.input_ids[at], math.exp(-(slot - 1) / gamma)) if counts else (target.pad, 0.0))
        blocks.append(Block(target.hidden[row.input_ids[anchor]], labels))
    return blocks


@dataclass
class TargetWorker:
    """Makes the batches of every `count`-th assignment and puts them into that drafter's queue."""

    index: int
    settings: Settings
    target: Target
    sampler: Sampler
    queues: list[list[queue.Queue[Batch]]]
    team: Team
    first: int
    last: int

    def run(self) -> None:
        """Produce until the last step, never further ahead than the queues have room."""
        shape = self.settings.workload
        number = 0
        for step in range(self.first, self.last):
            for micro in range(shape.accumulation):
                for drafter in range(shape.drafter_threads):
                    if number % shape.target_workers == self.index:
                        place = self.queues[drafter][self.index]
                        self.team.put(place, self._batch(step, micro, drafter))
                    number += 1

    def _batch(self, step: int, micro: int, drafter: int) -> Batch:
        shape, training = self.settings.workload, self.settings.training
        gamma = decay_gamma(training, shape.block_size)
        blocks, rows = [], []
        for row in self.sampler.batch(step, micro, drafter):
            generator = random.Random(f"{training.seed}/{step}/{micro}/{drafter}/{row.id}")
            eligible = row.anchors()
            anchors = sorted(generator.sample(eligible, min(shape.anchors, len(eligible))))
            blocks.extend(make_blocks(row, anchors, self.target, shape.block_size, gamma))
            rows.append(row.id)
        return Batch(blocks, rows)


@dataclass
class DrafterWorker:
    """One replica: takes its batches, computes its gradient, averages it with the others, updates itself."""

    index: int
    settings: Settings
    parameters: Parameters
    optimizer: AdamW
    queues: list[queue.Queue[Batch]]
    exchange: Exchange
    team: Team
    first: int
    last: int
    observe: Callable[[Seen], None] | None = None
    at_work: AtWork | None = None
    moved: int = 0
    report: StepReport | None = None
    _number: int = field(init=False)

    def __post_init__(self) -> None:
        self._number = self.index  # assignments are counted as the target workers count them

    def run(self) -> None:
        """Train from step `first` to `last`, meeting the coordinator after each."""
        for step in range(self.first, self.last):
            self._step(step)
            self.moved += 1
            self.team.stepped()
            if not self.team.go():
                return

    def compute(self, step: int, blocks: list[Block]) -> StepOutput:
        """Return this worker's forward-backward of one batch."""
        output = forward_backward(self.parameters, blocks)
        if not math.isfinite(output.loss_sum):
            raise ValueError(f"the loss is {output.loss_sum} in worker {self.index} at step {step + 1}")
        return output

    def _step(self, step: int) -> None:
        total: StepOutput | None = None
        rows: list[int] = []
        blocks: list[Block] = []
        waited = 0.0
        for _ in range(self.settings.workload.accumulation):
            batch, wait = self._next()
            rows += batch.rows
            if self.at_work:
                self.at_work.note(self.index, step + 1, rows)
            output = self.compute(step, batch.blocks)
            if total is None:
                total = output
            else:
                add(total, output)
            blocks += batch.blocks
            waited += wait
        assert total is not None
        averaged = self.exchange.average(self.index, total)
        rate = learning_rate(self.settings.training, step + 1)
        before = copy(self.parameters) if self.observe else {}
        self.optimizer.update(self.parameters, averaged.gradient, rate)
        self.report = StepReport(averaged, norm(averaged.gradient), rate, rows, waited)
        if self.observe:
            self.observe(Seen(blocks, before, total, averaged, copy(self.parameters)))

    def _next(self) -> tuple[Batch, float]:
        batch, wait = self.team.get(self.queues[self._number % len(self.queues)])
        self._number += self.settings.workload.drafter_threads
        return batch, wait


def copy(parameters: Parameters) -> Parameters:
    """Return a copy that later updates do not touch."""
    return {name: list(values) for name, values in parameters.items()}
