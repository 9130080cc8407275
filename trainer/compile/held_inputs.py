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


class HeldInputs:
    """Holds the inputs of one bucket, and what is prepared of them, for good."""

    def __init__(self, example: Sequence[Tensor], prepare: Callable[..., Prepared]) -> None:
        self._prepare = prepare
        self._held = [each.clone() for each in example]
        self._prepared = prepare(*self._held)
        for tensor in self._prepared.tensors():
            keep_address(tensor)

    def load(self, inputs: Sequence[Tensor]) -> Prepared:
        """The held arguments with the values of `inputs`, copied on the caller's current stream."""
        for held, value in zip(self._held, inputs, strict=True):
            held.copy_(value)
        fresh = self._prepare(*self._held)
        for held, value in zip(self._prepared.tensors(), fresh.tensors(), strict=True):
            # what `prepare` hands through is there already
            if held.data_ptr() != value.data_ptr():
                held.copy_(value)
        return self._prepared


def keep_address(tensor: Tensor) -> None:
    """Promise the compiler that this tensor stays where it is: it is then read in place, not copied each step."""
    torch._dynamo.mark_static_address(tensor)
