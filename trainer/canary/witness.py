"""Witnesses: the parts of a worker's step wrapped, so that what they take and give is there for the judge.

They run in the worker's thread and on its stream, and the worker's own code is the run's. What they keep is in host
memory, and of one step only: the judge looks while all workers stand still, and drops it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from trainer.anchors import block_token_ids
from trainer.block_mask import BlockRanges, context_limits
from trainer.compile import private_function
from trainer.dflash_model import DFlashDrafter, DrafterConfig
from trainer.exchange import Exchange
from trainer.parts import Parts
from trainer.replica import DrafterReplica
from trainer.step import Batch, FrozenHead, StepStats, TrainingStep, mask_builder

Named = dict[str, Tensor]

_LATE_CYCLES = 40_000_000
"""Of a GPU's clock: about 20 ms, far more than the host needs to queue an exchange and an update."""
_LATE_BYTES = 64 << 20


@dataclass
class StepRecord:
    """One optimiser step of one worker: hidden states and sums by micro-batch, gradients before the exchange.

    `own` is empty where nothing is exchanged: the gradients are then the step's own, which nothing writes later.
    """

    hidden: list[Tensor] = field(default_factory=list)
    loss_sums: list[float] = field(default_factory=list)
    weight_sums: list[float] = field(default_factory=list)
    own: Named = field(default_factory=dict)


@dataclass
class WorkerRecord:
    """All that is kept of one worker; `step` is the one that was just taken.

    `batches` stay on the device to the end: memory that fell as they went would hide memory that grows.
    """

    batches: list[Batch]
    replica: DrafterReplica | None = None
    step: StepRecord = field(default_factory=StepRecord)

    @property
    def trained(self) -> DrafterReplica:
        """The replica, once it is built."""
        assert self.replica is not None
        return self.replica

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters', in the order of the step's gradients."""
        return tuple(name for name, _ in self.trained.drafter.named_parameters())

    @property
    def gradients(self) -> Named:
        """The replica's gradients themselves, on its device: after a step, the exchanged ones."""
        return dict(zip(self.names, self.trained.step.gradients, strict=True))


def host_copy(tensor: Tensor) -> Tensor:
    """A copy in host memory that nothing writes to again; waits for the thread's own stream only."""
    return tensor.detach().to("cpu", copy=True)


class HiddenFunction:
    """The drafter's hidden states, compiled as the run compiles its step, in a code object of its own."""

    def __init__(self, parts: Parts, drafter: DFlashDrafter, frozen: FrozenHead, worker: int) -> None:
        def hidden(ids: Tensor, features: Tensor, positions: Tensor, *masks: Tensor | BlockRanges) -> Tensor:
            return drafter(nn.functional.embedding(ids, frozen.embed_weight), features, positions, *masks)

        self._config: DrafterConfig = drafter.config
        work, device = parts.settings.workload, frozen.embed_weight.device
        compiled = parts.strategy.compiles
        self._masks = {
            bucket: mask_builder(drafter.config, device, bucket, compiled=compiled) for bucket in work.buckets
        }
        self._functions: dict[int, Callable[..., Tensor]] = {
            bucket: parts.strategy.compile(private_function(hidden, f"canary_{worker}_bucket_{bucket}"))
            for bucket in work.buckets
        }

    @torch.no_grad()
    def __call__(self, batch: Batch) -> Tensor:
        """[N, A * (B - 1), D], on the device; the next call may write into it again."""
        bucket, size = batch.input_ids.shape[1], self._config.block_size
        ids = block_token_ids(batch.input_ids, batch.anchors, size, self._config.mask_token_id)
        masks = self._masks[bucket](context_limits(batch.anchors, batch.lengths))
        return self._functions[bucket](ids, batch.features, batch.anchors.positions, *masks)


class WatchedStep:
    """A `TrainingStep` that keeps hidden states and loss sums. `stop` is called before its first micro-batch of all."""

    def __init__(
        self, inner: TrainingStep, hidden: HiddenFunction, record: WorkerRecord, stop: Callable[[], None]
    ) -> None:
        self._inner = inner
        self._hidden = hidden
        self._record = record
        self._stop: Callable[[], None] | None = stop

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
        if self._stop is not None:
            stop, self._stop = self._stop, None
            stop()
        if first:
            self._record.step = StepRecord()
        step = self._record.step
        # before the last micro-batch, which may update the parameters
        step.hidden.append(host_copy(self._hidden(batch)))
        stats = self._inner.accumulate(batch, normaliser, first=first, last=last)
        loss_sum, weight_sum, *_ = stats.numbers()
        step.loss_sums.append(loss_sum)
        step.weight_sums.append(weight_sum)
        return stats

    def update(self) -> Tensor:
        """See `TrainingStep`."""
        return self._inner.update()


class Latecomer:
    """On CUDA each worker in turn comes late to the exchange, step by step, and is late again with its part of the sum.

    So an exchange, or an update, that does not wait for another worker's stream is wrong for certain, not once in a
    thousand steps.
    """

    def __init__(self, workers: int) -> None:
        self._steps = [0] * workers
        self._late = [False] * workers

    def before(self, worker: int, gradients: Sequence[Tensor]) -> None:
        """Before its exchange, in the worker's thread."""
        turn = self._steps[worker] % len(self._steps) == worker
        self._steps[worker] += 1
        self._late[worker] = turn and gradients[0].is_cuda
        if self._late[worker]:
            _come_late(gradients)

    def between(self, worker: int) -> None:
        """When all have come, in the worker's thread."""
        if self._late[worker]:
            torch.cuda._sleep(_LATE_CYCLES)


class WatchedExchange:
    """An `Exchange` that keeps each worker's gradients as they were before it."""

    def __init__(self, inner: Exchange, records: Sequence[WorkerRecord], late: Latecomer) -> None:
        self._inner = inner
        self._records = records
        self._late = late

    def open(self) -> None:
        """See `Exchange`."""
        self._inner.open()

    def scalars(self, worker: int, values: Sequence[float]) -> list[float]:
        """See `Exchange`."""
        return self._inner.scalars(worker, values)

    def gradients(self, worker: int, gradients: Sequence[Tensor]) -> None:
        """See `Exchange`."""
        if len(self._records) > 1:
            record = self._records[worker]
            record.step.own = {name: host_copy(each) for name, each in zip(record.names, gradients, strict=True)}
            self._late.before(worker, gradients)
        self._inner.gradients(worker, gradients)


@torch.no_grad()
def _come_late(gradients: Sequence[Tensor]) -> None:
    """On the thread's stream: zeros, a wait on the GPU, the gradients again; of as many of them as take little room."""
    chosen, room = [], _LATE_BYTES
    for each in sorted(gradients, key=lambda each: each.nbytes):
        room -= each.nbytes
        if room < 0:
            break
        chosen.append(each)
    kept = [each.clone() for each in chosen]
    torch._foreach_zero_(chosen)
    torch.cuda._sleep(_LATE_CYCLES)
    torch._foreach_copy_(chosen, kept)


@dataclass(frozen=True)
class WatchedReplica:
    """A `workers.Replica` with a witness round its step."""

    step: TrainingStep
