"""A step's inputs at addresses that never change: what CUDA graphs take for granted.

A graph reads its inputs where they lay at its capture. Inductor's graphs without trees copy most of them there, but
the captured backward reads whatever the forward saved at the address of the capture, the forward's own inputs included
(torch 2.11 `compile_fx.cudagraphify_impl`: every saved tensor counts as static). A batch at another address is then a
bare AssertionError, or, with size asserts off, gradients of an old batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from trainer.compile.definition import Prepared

_LARGE = 65_536


class HeldInputs:
    """The inputs of one bucket; `load` copies the next ones into them, on the caller's current stream."""

    def __init__(self, example: Sequence[Tensor], prepare: Callable[..., Prepared]) -> None:
        self._prepare = prepare
        self._held = [each.clone(memory_format=torch.contiguous_format) for each in example]
        self._kept: Prepared | None = None
        # one fused copy for each dtype: a mixed list would be copied one by one. What is large goes alone: a fused copy
        # has a block for 65,536 elements, too few for the GPU's width
        large = [[index] for index, each in enumerate(example) if each.numel() > _LARGE]
        small = [index for index, each in enumerate(example) if each.numel() <= _LARGE]
        dtypes = dict.fromkeys(example[index].dtype for index in small)
        self._groups = [*large, *([index for index in small if example[index].dtype == dtype] for dtype in dtypes)]

    @property
    def tensors(self) -> list[Tensor]:
        """Where the inputs lie."""
        return self._held

    @torch.no_grad()
    def load(self, inputs: Sequence[Tensor]) -> None:
        """Take the values of `inputs`; shapes, dtypes and devices must be the example's."""
        for group in self._groups:
            if len(group) == 1:
                self._held[group[0]].copy_(inputs[group[0]])
            else:
                torch._foreach_copy_([self._held[index] for index in group], [inputs[index] for index in group])

    @torch.no_grad()
    def prepared(self) -> Prepared:
        """Prepared of what is held now, in new memory."""
        return self._prepare(*self._held)

    def keep_arguments(self) -> None:
        """From now on `arguments` are in the same memory too, and the compiler is promised so."""
        self._kept = self.prepared()
        for tensor in self._kept.tensors():
            keep_address(tensor)

    @torch.no_grad()
    def arguments(self) -> Prepared:
        """Prepared of what is held now, in the memory of `keep_arguments`."""
        assert self._kept is not None
        for kept, value in zip(self._kept.tensors(), self.prepared().tensors(), strict=True):
            # what `prepare` hands through is there already
            if kept.data_ptr() != value.data_ptr():
                kept.copy_(value)
        return self._kept


def keep_address(tensor: Tensor) -> None:
    """Promise the compiler that this tensor stays where it is: it is then read in place, not copied each step."""
    torch._dynamo.mark_static_address(tensor)
