"""The threads of a run: target workers make batches, drafter workers train on them.

A target worker takes an assignment, runs the frozen target on its rows (or reads what that gave) and hands the finished
batch to the drafter's bounded queue. A drafter worker owns one replica. The first exception anywhere ends all of them
(`abort.Abort`).
"""

from __future__ import annotations

import abc
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from trainer.abort import Abort
from trainer.anchors import AnchorRule, Anchors, sample_anchors
from trainer.board import StepBoard, WorkerReport
from trainer.compile import Gate, own_device
from trainer.data import Rows, TrainingData
from trainer.exchange import Exchange
from trainer.loss import block_labels
from trainer.meter import Meter
from trainer.pace import Pace
from trainer.queues import Assignment, Assignments, OrderedQueue
from trainer.recorded_target import RecordedTarget
from trainer.sampler import RowOrder, derive_seed
from trainer.step import Batch, StepStats, TrainingStep
from trainer.target import Target
from trainer.transfer import send


class Worker(threading.Thread, abc.ABC):
    """A named thread whose exception goes to `abort`. Threads are daemons: a hung one cannot keep the process alive."""

    def __init__(
        self, name: str, device: torch.device, cpu_threads: int, abort: Abort, *, others: Sequence[torch.device] = ()
    ) -> None:
        """`others`: more devices that this thread works on."""
        super().__init__(name=name, daemon=True)
        self.device = device
        self._others = others
        self._cpu_threads = cpu_threads
        self._abort = abort

    def run(self) -> None:
        """Run `work` on the worker's device."""
        try:
            # a per-thread value in OpenMP, and one that compiled code is guarded on: set once, here
            torch.set_num_threads(self._cpu_threads)
            with own_device(self.device, *self._others):
                self.work()
        except BaseException as error:  # whatever ends a worker must end the run
            self._abort.fail(self.name, error)

    @abc.abstractmethod
    def work(self) -> None:
        """What the worker does."""


class FeatureSource(Protocol):
    """Where hidden states come from: a `Target`, a `RecordedTarget`, or the disk (`hidden_states.HiddenStates`)."""

    def features_of(self, rows: Rows) -> Tensor:
        """Hidden states of a padded batch on the CPU, [N, S, K*D], zero at and after each row's length."""
        ...


@dataclass(frozen=True)
class BatchMaker:
    """Turns row numbers into a batch. Pure: the same assignment gives the same bits.

    `anchors`, `rule`, `block_size` and `gamma` (slots) are the drafter's; `seed` is the run's.
    """

    data: TrainingData
    order: RowOrder
    anchors: int
    rule: AnchorRule
    block_size: int
    gamma: float
    seed: int
    dtype: torch.dtype

    def make(self, assignment: Assignment, source: FeatureSource, device: torch.device) -> Batch:
        """The batch of one micro-batch, on `device`."""
        step, micro, worker = assignment.step, assignment.micro, assignment.worker
        rows = self.data.collate(self.order.rows_for(step, micro, worker))
        return self.from_rows(rows, derive_seed(self.seed, "anchors", step, micro, worker), source, device)

    def from_rows(self, rows: Rows, seed: int, source: FeatureSource, device: torch.device) -> Batch:
        """The same for given rows; anchors come from a CPU generator seeded with `seed`."""
        # first: the target works on them while this thread makes the rest
        features = source.features_of(rows)
        generator = torch.Generator().manual_seed(seed)
        anchors = sample_anchors(rows.loss_mask, rows.lengths, self.anchors, generator, self.rule)
        labels, weights = block_labels(
            rows.input_ids, rows.loss_mask, rows.lengths, anchors, self.block_size, self.gamma
        )
        return Batch(
            row_ids=rows.row_ids,
            input_ids=send(rows.input_ids, device),
            lengths=send(rows.lengths, device),
            features=features.to(device, self.dtype, non_blocking=True),
            anchors=Anchors(send(anchors.positions, device), send(anchors.keep, device)),
            labels=send(labels, device),
            weights=send(weights, device),
            weight_sum=float(weights.double().sum()),
        )


class TargetWorker(Worker):
    """Makes batches until all are assigned, or every drafter has stopped.

    `devices`: the target's; hidden states come out on the first. `recorded`: the batch shapes [rows, tokens] for which
    the target's forward is captured in CUDA graphs, inside the gate; none of them: it stays eager.
    """

    def __init__(
        self,
        index: int,
        *,
        devices: Sequence[torch.device],
        source: FeatureSource,
        assignments: Assignments,
        queues: list[OrderedQueue[Batch]],
        drafter_devices: tuple[torch.device, ...],
        maker: BatchMaker,
        recorded: Sequence[tuple[int, int]],
        gate: Gate,
        meter: Meter,
        cpu_threads: int,
        abort: Abort,
    ) -> None:
        super().__init__(f"target-{index}", devices[0], cpu_threads, abort, others=devices[1:])
        self._meter = meter
        self._source = source
        self._assignments = assignments
        self._queues = queues
        self._drafter_devices = drafter_devices
        self._maker = maker
        self._recorded = recorded
        self._gate = gate

    def work(self) -> None:
        """See the class."""
        source = self._source
        if isinstance(source, Target) and self._recorded:
            with self._gate.exclusive(self.name):
                source = RecordedTarget(source, self._recorded)
        # no work on any device of this process while a drafter compiles or captures
        self._gate.pass_through()
        while (assignment := self._assignments.take()) is not None:
            device = self._drafter_devices[assignment.worker]
            with self._meter.span("busy"):
                batch = self._maker.make(assignment, source, device)
            batch = replace(batch, ready=self._hand_over(device))
            self._meter.count(batch.input_ids.numel())
            with self._meter.span("wait"):
                taken = self._queues[assignment.worker].put(assignment.index, batch)
            if not taken:
                return

    def _hand_over(self, device: torch.device) -> torch.cuda.Event | None:
        """An event after everything that this worker has sent to `device`; None between CPUs.

        A copy from one GPU to another runs on this thread's streams of both.
        """
        sent = torch.cuda.current_stream(self.device).record_event() if self.device.type == "cuda" else None
        if device.type != "cuda" or device == self.device:
            return sent
        there = torch.cuda.current_stream(device)
        if sent is not None:
            there.wait_event(sent)
        return there.record_event()


class Replica(Protocol):
    """What a drafter worker trains; built inside the gate."""

    @property
    def step(self) -> TrainingStep:
        """Its compiled step."""
        ...


@dataclass(frozen=True)
class TrainingPlan:
    """Which steps a run takes, and what it does between them.

    `first_step` optimiser steps are done already; it ends after `last_step`. `rate(step)` is the learning rate of
    optimiser step `step` (from 0). `stop` asks for an early end, after a whole step. `after_step(worker, done, last)`
    runs in every drafter's thread after each step, before its next one; `before_step(worker, number, samples)` once it
    has the samples of step `number` (from 1).
    """

    first_step: int
    last_step: int
    accumulation: int
    log_every: int
    rate: Callable[[int], float]
    stop: Callable[[], bool]
    after_step: Callable[[int, int, bool], None]
    before_step: Callable[[int, int, Sequence[int]], None] = lambda _worker, _number, _samples: None


class DrafterWorker(Worker):
    """Trains one replica: takes batches, accumulates, exchanges gradients, updates."""

    def __init__(
        self,
        index: int,
        *,
        device: torch.device,
        build: Callable[[int], Replica],
        queue: OrderedQueue[Batch],
        exchange: Exchange,
        plan: TrainingPlan,
        board: StepBoard,
        gate: Gate,
        cpu_threads: int,
        abort: Abort,
        meter: Meter | None = None,
    ) -> None:
        super().__init__(f"drafter-{index}", device, cpu_threads, abort)
        self._meter = meter or Meter(device)
        self._index = index
        self._build = build
        self._queue = queue
        self._exchange = exchange
        self._plan = plan
        self._board = board
        self._gate = gate
        self._pace = Pace(device)
        self.steps_done = plan.first_step

    def work(self) -> None:
        """See the class."""
        try:
            with self._gate.exclusive(self.name):
                replica = self._build(self._index)
            self._gate.pass_through()
            for step in range(self._plan.first_step, self._plan.last_step):
                if self._train(step, replica):
                    return
        finally:
            self._queue.close()

    def _take(self) -> Batch:
        with self._meter.span("wait"):
            batch = self._queue.get()
            if batch.ready is not None and self.device.type == "cuda":
                stream = torch.cuda.current_stream(self.device)
                stream.wait_event(batch.ready)
                for tensor in batch.tensors():
                    # the allocator must not give the memory to the producer again while this stream reads it
                    tensor.record_stream(stream)
            elif batch.ready is not None:
                batch.ready.synchronize()
        return batch

    def _train(self, step: int, replica: Replica) -> bool:
        """One optimiser step; True when it was the last one."""
        plan, own = self._plan, replica.step
        self._pace.wait()
        started = time.monotonic()
        batches = [self._take() for _ in range(plan.accumulation)]
        waited = time.monotonic() - started
        samples = tuple(row for each in batches for row in each.row_ids)
        plan.before_step(self._index, step + 1, samples)
        # one worker's look at the flag counts for all: they must stop after the same step
        asked = 1.0 if self._index == 0 and plan.stop() else 0.0
        weight, stop = self._exchange.scalars(self._index, [sum(each.weight_sum for each in batches), asked])
        normaliser = torch.full((), 1.0 / weight, dtype=torch.float32, device=self.device)
        rate = plan.rate(step)
        own.rate.fill_(rate)
        stats: StepStats | None = None
        for number, batch in enumerate(batches, 1):
            part = own.accumulate(batch, normaliser, first=number == 1, last=number == len(batches))
            stats = part if stats is None else stats + part
        assert stats is not None
        self._exchange.gradients(self._index, own.gradients)
        norm = own.update()
        self._pace.mark()
        done = step + 1
        last = bool(stop) or done == plan.last_step
        self.steps_done = done
        if last or done % plan.log_every == 0:
            report = WorkerReport(self._index, samples, waited, tuple(stats.numbers()), float(norm), rate)
            self._board.post(done, report)
        plan.after_step(self._index, done, last)
        return last
