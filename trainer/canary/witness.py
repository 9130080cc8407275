"""Witnesses: the parts of a worker's step wrapped, so that what they take and give is kept for the judge.

They run in the worker's thread and on its stream, and copy to host memory (about three times the drafter's size for
each worker and step): nothing stays on the device, and the worker's own code is the run's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from trainer.anchors import block_token_ids
from trainer.block_mask import context_limits
from trainer.compile import private_function
from trainer.dflash_model import DFlashDrafter, DrafterConfig
from trainer.exchange import Exchange
from trainer.parts import Parts
from trainer.replica import DrafterReplica
from trainer.step import Batch, FrozenHead, StepStats, TrainingStep, mask_builder

Named = dict[str, Tensor]


@dataclass
class StepRecord:
    """One optimiser step of one worker: parameters before it, outputs and loss sums by micro-batch, gradients."""

    before: Named
    hidden: list[Tensor] = field(default_factory=list)
    loss_sums: list[float] = field(default_factory=list)
    own: Named = field(default_factory=dict)
    exchanged: Named = field(default_factory=dict)


@dataclass
class WorkerRecord:
    """All that is kept of one worker. `names` are the parameters', in the order of the step's gradients."""

    batches: list[Batch]
    names: tuple[str, ...] = ()
    steps: list[StepRecord] = field(default_factory=list)
    replica: DrafterReplica | None = None


def host_copy(tensor: Tensor) -> Tensor:
    """A copy in host memory that nothing writes to again; waits for the thread's own stream only."""
    return tensor.detach().to("cpu", copy=True)


class HiddenFunction:
    """The drafter's hidden states, compiled as the run compiles its step, in a code object of its own."""

    def __init__(self, parts: Parts, drafter: DFlashDrafter, frozen: FrozenHead, worker: int) -> None:
        def hidden(ids: Tensor, features: Tensor, positions: Tensor, mask: Tensor | BlockMask) -> Tensor:
            return drafter(nn.functional.embedding(ids, frozen.embed_weight), features, positions, mask)

        self._config: DrafterConfig = drafter.config
        work, device = parts.settings.workload, frozen.embed_weight.device
        compiled, size = parts.strategy.compiles, drafter.config.block_size
        self._masks = {
            bucket: mask_builder(device, bucket, size, work.anchors, compiled=compiled) for bucket in work.buckets
        }
        self._functions: dict[int, Callable[..., Tensor]] = {
            bucket: parts.strategy.compile(private_function(hidden, f"canary_{worker}_bucket_{bucket}"))
            for bucket in work.buckets
        }

    @torch.no_grad()
    def __call__(self, batch: Batch) -> Tensor:
        """[N, A * B, D], on the device; the next call may write into it again."""
        bucket, size = batch.input_ids.shape[1], self._config.block_size
        ids = block_token_ids(batch.input_ids, batch.anchors, size, self._config.mask_token_id)
        limits = context_limits(batch.anchors, batch.lengths)
        mask = self._masks[bucket](limits)
        return self._functions[bucket](ids, batch.features, batch.anchors.positions, mask)


class WatchedStep:
    """A `TrainingStep` that keeps the parameters before each step, the hidden states and the loss sums."""

    def __init__(
        self, inner: TrainingStep, drafter: DFlashDrafter, hidden: HiddenFunction, record: WorkerRecord
    ) -> None:
        self._inner = inner
        self._drafter = drafter
        self._hidden = hidden
        self._record = record

    @property
    def rate(self) -> Tensor:
        """See `TrainingStep`."""
        return self._inner.rate

    @property
    def gradients(self) -> list[Tensor]:
        """See `TrainingStep`."""
        return self._inner.gradients

    def accumulate(self, batch: Batch, normaliser: Tensor, *, first: bool, last: bool) -> StepStats:
        """See `TrainingStep`."""
        if first:
            before = {name: host_copy(each) for name, each in self._drafter.named_parameters()}
            self._record.steps.append(StepRecord(before))
        step = self._record.steps[-1]
        # before the last micro-batch, which may update the parameters
        step.hidden.append(host_copy(self._hidden(batch)))
        stats = self._inner.accumulate(batch, normaliser, first=first, last=last)
        step.loss_sums.append(stats.numbers()[0])
        return stats

    def update(self) -> Tensor:
        """See `TrainingStep`."""
        return self._inner.update()


class WatchedExchange:
    """An `Exchange` that keeps each worker's gradients before and after."""

    def __init__(self, inner: Exchange, records: Sequence[WorkerRecord]) -> None:
        self._inner = inner
        self._records = records

    def open(self) -> None:
        """See `Exchange`."""
        self._inner.open()

    def scalars(self, worker: int, values: Sequence[float]) -> list[float]:
        """See `Exchange`."""
        return self._inner.scalars(worker, values)

    def gradients(self, worker: int, gradients: Sequence[Tensor]) -> None:
        """See `Exchange`."""
        record = self._records[worker]
        step = record.steps[-1]
        step.own = _named(record.names, gradients)
        self._inner.gradients(worker, gradients)
        step.exchanged = _named(record.names, gradients)


def _named(names: Sequence[str], tensors: Sequence[Tensor]) -> Named:
    return {name: host_copy(each) for name, each in zip(names, tensors, strict=True)}


@dataclass(frozen=True)
class WatchedReplica:
    """A `workers.Replica` with a witness round its step."""

    step: TrainingStep
