"""A drafter's training step, on top of `trainer.compile`.

1. `TrainingStep.accumulate`: forward and backward of one micro-batch; adds to the gradients.
2. `exchange.Exchange`: sums gradients over replicas.
3. `TrainingStep.update`: clips, updates, and gives the gradient norm.

With N rows a micro-batch, S tokens (a bucket), A anchor slots, B block size, D hidden size and K target layers.
Whatever changes from step to step is a tensor (learning rate, normaliser): a Python number would be frozen into a
captured graph.

The normaliser is 1 / (sum of the batches' label weights over all workers and micro-batches of the step). Batches are
prepared ahead, so it is known before any forward: the loss, and each gradient, is the weighted mean over the union of
all samples. Under D-PACE a batch's weights are 1 for each slot that counts: the gradient is then the sum of D-PACE's
weights x gradients over the number of those slots, as in speculators.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from trainer.anchors import Anchors, block_token_ids
from trainer.block_mask import BlockRanges, block_ranges, context_limits, dense_mask_of
from trainer.compile import Loss, Optimizer, Prepared, StepDefinition, StepPlan, Strategy, compiled_step
from trainer.dflash_model import DFlashDrafter, DrafterConfig
from trainer.fp8 import NarrowHead
from trainer.loss import DFLASH, block_loss


@dataclass(frozen=True)
class Batch:
    """One micro-batch on a drafter's device.

    `input_ids` long [N, S], `lengths` long [N], `features` [N, S, K*D] in the drafter's dtype, `anchors` ([N, A]),
    `labels` long and `weights` float32 [N, A, B]. `weight_sum` is the sum of `weights`, `row_ids` the rows' numbers.
    `ready`: recorded on the producer's stream when all of it is there (None on a CPU).
    """

    row_ids: tuple[int, ...]
    input_ids: Tensor
    lengths: Tensor
    features: Tensor
    anchors: Anchors
    labels: Tensor
    weights: Tensor
    weight_sum: float
    ready: torch.cuda.Event | None = None

    def tensors(self) -> list[Tensor]:
        """Every tensor of it, in a fixed order."""
        return [
            self.input_ids, self.lengths, self.features, self.anchors.positions, self.anchors.keep,
            self.labels, self.weights,
        ]  # fmt: skip


@dataclass(frozen=True)
class StepStats:
    """Sums over samples: 0-dim float32 tensors on the worker's device, the worker's own to keep."""

    loss_sum: Tensor
    weight_sum: Tensor
    first_slot_correct: Tensor
    first_slot_count: Tensor

    def __add__(self, other: StepStats) -> StepStats:
        return StepStats(
            self.loss_sum + other.loss_sum,
            self.weight_sum + other.weight_sum,
            self.first_slot_correct + other.first_slot_correct,
            self.first_slot_count + other.first_slot_count,
        )

    def numbers(self) -> list[float]:
        """loss_sum, weight_sum, first_slot_correct, first_slot_count: waits for this worker's own stream."""
        parts = (self.loss_sum, self.weight_sum, self.first_slot_correct, self.first_slot_count)
        return [float(each) for each in torch.stack(parts).tolist()]


class TrainingStep(Protocol):
    """One replica's step, which belongs to one thread. With several replicas the exchange is between its two calls.

    Set `rate` before the first micro-batch: with one replica the update may run inside the last `accumulate`.
    """

    @property
    def rate(self) -> Tensor:
        """The learning rate: 0-dim float32, always the same tensor."""
        ...

    @property
    def gradients(self) -> list[Tensor]:
        """What the exchange sums, by parameter, always the same tensors; the update never writes into them."""
        ...

    def accumulate(self, batch: Batch, normaliser: Tensor, *, first: bool, last: bool) -> StepStats:
        """Adds the gradient of (weighted loss sum x `normaliser`) to the gradients; `first` starts from zero.

        `normaliser` is 0-dim float32 on the batch's device.
        """
        ...

    def update(self) -> Tensor:
        """Clip and update; the gradient norm before clipping, 0-dim."""
        ...


@dataclass(frozen=True)
class FrozenHead:
    """The target's embedding and language-model head, [V, D] each, in the drafter's dtype, shared on a device.

    `narrow`: the head as 8-bit floats, where the loss is to multiply those.
    """

    embed_weight: Tensor
    head_weight: Tensor
    narrow: NarrowHead | None = None

    @property
    def multiplied(self) -> Tensor | NarrowHead:
        """The head of the loss's products."""
        return self.head_weight if self.narrow is None else self.narrow


MasksOf = Callable[[Tensor], tuple[Tensor | BlockRanges, ...]]
"""The masks of given context limits, long [N, A]: one for each of the drafter's `attention_types`."""


def mask_builder(config: DrafterConfig, device: torch.device, seq_len: int, *, compiled: bool) -> MasksOf:
    """How a step makes its masks: for `block_attention` in compiled code on CUDA, dense for SDPA everywhere else."""
    size, windows = config.block_size, [config.window_of(kind) for kind in config.attention_types]
    if compiled and device.type == "cuda":
        return lambda limits: tuple(block_ranges(limits, size, window) for window in windows)
    return lambda limits: tuple(dense_mask_of(limits, seq_len, size, window) for window in windows)


class DrafterStep:
    """A drafter replica's `TrainingStep`, compiled by `strategy` for the buckets; belongs to one thread.

    Build it in that thread, inside the gate; `name` must differ between workers. `rows` and `slots` are a micro-batch's
    rows and a row's anchor slots, `replicas` exchange their gradients. Drafter and optimiser are left as they were
    (`compile.compiled_step`).
    """

    def __init__(
        self,
        drafter: DFlashDrafter,
        frozen: FrozenHead,
        optimizer: Optimizer,
        strategy: Strategy,
        *,
        buckets: Sequence[int],
        rows: int,
        slots: int,
        accumulation: int,
        replicas: int,
        name: str,
        loss_type: str = DFLASH,
    ) -> None:
        config, device, dtype = drafter.config, frozen.embed_weight.device, frozen.embed_weight.dtype
        masks = {each: mask_builder(config, device, each, compiled=strategy.compiles) for each in buckets}
        definition = StepDefinition(
            module=drafter,
            loss=_loss(drafter, frozen, loss_type),
            optimizer=optimizer,
            prepare=_prepare(config, masks),
            constants=(frozen.embed_weight, frozen.head_weight, *(frozen.narrow.tensors if frozen.narrow else ())),
        )
        normaliser = torch.ones((), device=device)
        blanks = [blank_batch(config, each, rows, slots, device=device, dtype=dtype) for each in buckets]
        examples = tuple((*each.tensors(), normaliser) for each in blanks)
        self._step = compiled_step(StepPlan(definition, examples, accumulation, replicas, name), strategy)

    @property
    def rate(self) -> Tensor:
        """See `TrainingStep`."""
        return self._step.rate

    @property
    def gradients(self) -> list[Tensor]:
        """See `TrainingStep`; in the order of the drafter's parameters."""
        return self._step.gradients

    def accumulate(self, batch: Batch, normaliser: Tensor, *, first: bool, last: bool) -> StepStats:
        """See `TrainingStep`."""
        sums = self._step.accumulate(*batch.tensors(), normaliser, first=first, last=last)
        return StepStats(*sums.unbind())

    def update(self) -> Tensor:
        """See `TrainingStep`."""
        return self._step.update()


def _prepare(config: DrafterConfig, masks: Mapping[int, MasksOf]) -> Callable[..., Prepared]:
    def prepare(  # noqa: PLR0917 -- the order of Batch.tensors
        input_ids: Tensor,
        lengths: Tensor,
        features: Tensor,
        positions: Tensor,
        keep: Tensor,
        labels: Tensor,
        weights: Tensor,
        normaliser: Tensor,
    ) -> Prepared:
        anchors, size = Anchors(positions, keep), config.block_size
        ids = block_token_ids(input_ids, anchors, size, config.mask_token_id)
        seen = masks[input_ids.shape[1]](context_limits(anchors, lengths))
        return Prepared((ids, features, positions, labels, weights, normaliser, *seen))

    return prepare


def _loss(drafter: DFlashDrafter, frozen: FrozenHead, loss_type: str) -> Loss:
    def loss(  # noqa: PLR0917 -- positional: compiled code then has one way to be called
        ids: Tensor,
        features: Tensor,
        positions: Tensor,
        labels: Tensor,
        weights: Tensor,
        normaliser: Tensor,
        /,
        *masks: Tensor | BlockRanges,
    ) -> tuple[Tensor, Tensor]:
        """Normalised loss (with gradient), and the four sums of `StepStats`."""
        block = nn.functional.embedding(ids, frozen.embed_weight)
        hidden = drafter(block, features, positions, *masks)
        found = block_loss(hidden, frozen.multiplied, labels, weights, loss_type=loss_type)
        sums = (found.loss_sum, found.weight_sum, found.first_slot_correct, found.first_slot_count)
        return found.loss_sum * normaliser, torch.stack(sums)

    return loss


def blank_batch(
    config: DrafterConfig, bucket: int, rows: int, slots: int, *, device: torch.device, dtype: torch.dtype
) -> Batch:
    """A batch of the right shapes that draws no random number, for warming up."""
    size, width = config.block_size, len(config.target_layer_ids) * config.hidden_size
    positions = torch.arange(slots, device=device).clamp(max=bucket - 2).expand(rows, slots).contiguous()
    shape = (rows, slots, size)
    return Batch(
        row_ids=(),
        input_ids=torch.zeros((rows, bucket), dtype=torch.long, device=device),
        lengths=torch.full((rows,), bucket, dtype=torch.long, device=device),
        features=torch.full((rows, bucket, width), 0.01, dtype=dtype, device=device),
        anchors=Anchors(positions, torch.ones_like(positions, dtype=torch.bool)),
        labels=torch.zeros(shape, dtype=torch.long, device=device),
        weights=torch.ones(shape, dtype=torch.float32, device=device),
        weight_sum=float(rows * slots * size),
    )
