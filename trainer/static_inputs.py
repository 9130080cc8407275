"""A step's inputs at addresses that never change: what CUDA graphs without trees take for granted.

Without trees, Inductor's captured backward reads whatever the forward saved at the address of the capture; the
forward's own inputs are among that (torch 2.11 `compile_fx.cudagraphify_impl`: every saved tensor counts as static).
A batch at another address is then a bare AssertionError, or, with size asserts off, gradients of an old batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

Mask = Tensor | BlockMask
MaskOf = Callable[[Tensor], Mask]
"""The mask of given context limits, long [N, A]."""


@dataclass(frozen=True)
class StepInputs:
    """What the compiled function of one bucket takes.

    N rows, S tokens, A anchors, B block size. `ids` long [N, A * B], `features` [N, S, K * D], `positions` and
    `limits` long [N, A] (`mask` is made of `limits`), `labels` long and `weights` float32 [N, A, B].
    """

    ids: Tensor
    features: Tensor
    positions: Tensor
    limits: Tensor
    mask: Mask
    labels: Tensor
    weights: Tensor
    normaliser: Tensor

    def tensors(self) -> list[Tensor]:
        """Every tensor of it, in a fixed order."""
        found: list[Tensor] = []
        for field in fields(self):
            value = getattr(self, field.name)
            parts = value.as_tuple() if isinstance(value, BlockMask) else (value,)
            found.extend(part for part in parts if isinstance(part, Tensor))
        return found


class StaticInputs:
    """Holds one `StepInputs` for good; `load` copies the next batch into it, on the caller's current stream."""

    def __init__(self, first: StepInputs, mask_of: MaskOf) -> None:
        limits = first.limits.clone()
        self._held = StepInputs(
            ids=first.ids.clone(),
            features=first.features.clone(),
            positions=first.positions.clone(),
            limits=limits,
            # its mask_mod reads `limits` itself
            mask=mask_of(limits),
            labels=first.labels.clone(),
            weights=first.weights.clone(),
            normaliser=first.normaliser.clone(),
        )
        for tensor in self._held.tensors():
            keep_address(tensor)

    def load(self, fresh: StepInputs) -> StepInputs:
        """The held inputs with `fresh`'s values; shapes must be the first ones'."""
        for held, value in zip(self._held.tensors(), fresh.tensors(), strict=True):
            held.copy_(value)
        return self._held


def keep_address(tensor: Tensor) -> None:
    """Promise the compiler that this tensor stays where it is: it is then read in place, not copied each step."""
    torch._dynamo.mark_static_address(tensor)
