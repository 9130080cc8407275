"""One training step, in three parts that can each be replaced.

1. `ForwardBackward`: forward and backward of one micro-batch; adds to the gradients.
2. `exchange.Exchange`: sums gradients over replicas.
3. `OptimizerStep`: clips, updates, and gives the gradient norm.

With N rows a micro-batch, S tokens (a bucket), A anchor slots, B block size, D hidden size and K target layers.
Whatever changes from step to step is a tensor (learning rate, normaliser): a Python number would be frozen into a
captured graph.

The normaliser is 1 / (sum of label weights over all workers and micro-batches of the step). Batches are prepared ahead,
so it is known before any forward: the loss, and each gradient, is the weighted mean over the union of all samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from trainer.anchors import Anchors, block_token_ids
from trainer.block_mask import context_limits, dense_mask_of, flex_mask_of
from trainer.compile import Strategy, private_function, untouched
from trainer.dflash_model import DFlashDrafter, DrafterConfig
from trainer.loss import block_loss
from trainer.static_inputs import Mask, MaskOf, StaticInputs, StepInputs, keep_address


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
        """Every tensor of it, for the allocator's book-keeping between streams."""
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


class ForwardBackward(Protocol):
    """Part one: adds the gradient of (weighted loss sum x `normaliser`) to every parameter's `.grad`."""

    def __call__(self, batch: Batch, normaliser: Tensor) -> StepStats:
        """`normaliser` is 0-dim float32 on the batch's device."""
        ...


class OptimizerStep(Protocol):
    """Part three. `rate`: 0-dim float32 tensor, set before each step."""

    rate: Tensor

    @property
    def gradients(self) -> list[Tensor]:
        """What the exchange sums: the replica's gradients, always the same tensors."""
        ...

    def zero_gradients(self) -> None:
        """Before the first micro-batch of a step."""
        ...

    def step(self) -> Tensor:
        """Clip and update; the gradient norm before clipping, 0-dim."""
        ...


@dataclass(frozen=True)
class FrozenHead:
    """The target's embedding and language-model head, [V, D] each, in the drafter's dtype, shared on a device."""

    embed_weight: Tensor
    head_weight: Tensor


def mask_builder(device: torch.device, seq_len: int, block_size: int, *, compiled: bool) -> MaskOf:
    """How a step makes its mask: for flex attention in compiled code on CUDA, dense for SDPA everywhere else.

    Flex attention has no backward on a CPU, and uncompiled it holds all scores of all heads at once.
    """
    build = flex_mask_of if compiled and device.type == "cuda" else dense_mask_of
    return lambda limits: build(limits, seq_len, block_size)


class DrafterForwardBackward:
    """Forward and backward of a drafter replica, compiled by `strategy`; belongs to one thread.

    Each bucket gets a code object of its own, so that neither another replica nor another shape shares Dynamo's cache
    of this one. `name` must differ between workers.
    """

    def __init__(self, drafter: DFlashDrafter, frozen: FrozenHead, strategy: Strategy, name: str) -> None:
        self._drafter = drafter
        self._config: DrafterConfig = drafter.config
        self._frozen = frozen
        self._strategy = strategy
        self._name = name
        self._compiled: dict[int, ForwardLoss] = {}
        self._static: dict[int, StaticInputs] = {}
        if strategy.compiles:
            for weight in (frozen.embed_weight, frozen.head_weight):
                keep_address(weight)

    def _function(self, bucket: int) -> ForwardLoss:
        known = self._compiled.get(bucket)
        if known is None:
            plain = _forward_loss(self._drafter, self._frozen)
            known = self._strategy.compile(private_function(plain, f"{self._name}_bucket_{bucket}"))
            self._compiled[bucket] = known
        return known

    def __call__(self, batch: Batch, normaliser: Tensor) -> StepStats:
        """See `ForwardBackward`."""
        bucket = batch.input_ids.shape[1]
        given = self._inputs(bucket, batch, normaliser)
        loss, *sums = self._function(bucket)(
            given.ids, given.features, given.positions, given.mask, given.labels, given.weights, given.normaliser
        )
        loss.backward()
        # a replayed graph writes its outputs into the same memory again: keep copies
        return StepStats(*(each.detach().clone() for each in sums))

    def _inputs(self, bucket: int, batch: Batch, normaliser: Tensor) -> StepInputs:
        """The batch as the compiled function takes it; for graphs, always in the same memory."""
        size = self._config.block_size
        mask_of = mask_builder(batch.input_ids.device, bucket, size, compiled=self._strategy.compiles)
        limits = context_limits(batch.anchors, batch.lengths)
        fresh = StepInputs(
            ids=block_token_ids(batch.input_ids, batch.anchors, size, self._config.mask_token_id),
            features=batch.features,
            positions=batch.anchors.positions,
            limits=limits,
            mask=mask_of(limits),
            labels=batch.labels,
            weights=batch.weights,
            normaliser=normaliser,
        )
        if not self._strategy.graphs:
            return fresh
        held = self._static.get(bucket)
        if held is None:
            held = self._static[bucket] = StaticInputs(fresh, mask_of)
        return held.load(fresh)

    def warm_up(self, buckets: tuple[int, ...], rows: int, slots: int) -> None:
        """Run every shape, with a real backward, until nothing is left to compile; inside the gate.

        Leaves the replica as it was (`compile.untouched`); gradients are allocated afterwards.
        """
        weight = self._frozen.embed_weight
        normaliser = torch.ones((), device=weight.device)
        with untouched(self._drafter):
            for bucket in buckets:
                batch = blank_batch(self._config, bucket, rows, slots, device=weight.device, dtype=weight.dtype)
                for _ in range(self._strategy.warm_up_calls):
                    self(batch, normaliser)
        if weight.device.type == "cuda":
            torch.cuda.current_stream(weight.device).synchronize()


class ForwardLoss(Protocol):
    """What is compiled: see `_forward_loss`."""

    def __call__(  # noqa: PLR0917 -- positional: compiled code then has one way to be called
        self,
        ids: Tensor,
        features: Tensor,
        positions: Tensor,
        mask: Mask,
        labels: Tensor,
        weights: Tensor,
        normaliser: Tensor,
        /,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Normalised loss (with gradient), then the four sums of `StepStats`."""
        ...


def _forward_loss(drafter: DFlashDrafter, frozen: FrozenHead) -> ForwardLoss:
    def forward_loss(  # noqa: PLR0917 -- see ForwardLoss
        ids: Tensor,
        features: Tensor,
        positions: Tensor,
        mask: Mask,
        labels: Tensor,
        weights: Tensor,
        normaliser: Tensor,
        /,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        block = nn.functional.embedding(ids, frozen.embed_weight)
        hidden = drafter(block, features, positions, mask)
        found = block_loss(hidden, frozen.head_weight, labels, weights)
        return (
            found.loss_sum * normaliser,
            found.loss_sum,
            found.weight_sum,
            found.first_slot_correct,
            found.first_slot_count,
        )

    return forward_loss


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
