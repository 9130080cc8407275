"""A replica's gradients, in tensors that the step owns."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class Gradients:
    """One tensor for each parameter, allocated once. A parameter's `.grad` is not used.

    What a graph gives back lies in the graph's memory and is overwritten by its next replay; it is copied out here at
    once. That makes accumulating over micro-batches right with every kind of graph.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self.tensors = [torch.zeros_like(each) for each in parameters]

    def backward(self, loss: Tensor, *, first: bool) -> None:
        """Backward of `loss`: its gradients replace what is there if `first`, else they are added."""
        found = torch.autograd.grad(loss, self._parameters, allow_unused=True)
        used = [(mine, new) for mine, new in zip(self.tensors, found, strict=True) if new is not None]
        mine, new = [pair[0] for pair in used], [pair[1] for pair in used]
        with torch.no_grad():
            if first:
                unused = [each for each, got in zip(self.tensors, found, strict=True) if got is None]
                if unused:
                    torch._foreach_zero_(unused)
                torch._foreach_copy_(mine, new)
            else:
                torch._foreach_add_(mine, new)

    def zero(self) -> None:
        """Forget everything."""
        torch._foreach_zero_(self.tensors)
