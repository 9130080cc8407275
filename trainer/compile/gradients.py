"""A replica's gradients, in tensors that the step owns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

_TOGETHER_BYTES = 256 << 20
"""Above, copying all of them at every step takes longer than starting a sum for each."""
_ALIGNED = 16


class Gradients:
    """One tensor for each parameter, the same at every step. A parameter's `.grad` is not used.

    What a graph gives back lies in the graph's memory and is overwritten by its next replay; it is copied out here at
    once. That makes accumulating over micro-batches right with every kind of graph.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], *, together: bool) -> None:
        """`together`: where they are not many, as views of one tensor, which an exchange sums in one call."""
        self._parameters = list(parameters)
        self._takes = False
        self._foreign: set[int] = set()
        small = sum(each.nbytes for each in parameters) <= _TOGETHER_BYTES
        alike = len({(each.dtype, each.device) for each in parameters}) == 1
        self.together = together and small and alike
        self.tensors = _views(parameters) if self.together else [torch.zeros_like(each) for each in parameters]

    def take_captured(self, foreign: Iterable[Tensor]) -> None:
        """From now on what a capture with `first` gives back is the gradients itself: a copy less at every replay.

        For a step that captures one such backward; later micro-batches add into its memory, which stays allocated as
        long as it is held here. `foreign` are tensors of others which a backward could hand through.
        """
        self._takes, self._foreign = True, {_storage(each) for each in foreign}

    def backward(self, loss: Tensor, *, first: bool) -> None:
        """Backward of `loss`: its gradients replace what is there if `first`, else they are added."""
        found = torch.autograd.grad(loss, self._parameters, allow_unused=True)
        if first and self._takes and torch.cuda.is_current_stream_capturing():
            self._take(found)
            return
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

    def _take(self, found: Sequence[Tensor | None]) -> None:
        owned = set(self._foreign)
        for index, (parameter, new) in enumerate(zip(self._parameters, found, strict=True)):
            if new is None:
                self.tensors[index].zero_()
            elif new.is_contiguous() and new.dtype == parameter.dtype and _storage(new) not in owned:
                owned.add(_storage(new))
                self.tensors[index] = new.detach()
            else:
                self.tensors[index].copy_(new)

    def zero(self) -> None:
        """Forget everything."""
        torch._foreach_zero_(self.tensors)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _views(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """Of one tensor of zeros, each shaped like its parameter and beginning at a multiple of 16 elements."""
    room = [-(-each.numel() // _ALIGNED) * _ALIGNED for each in parameters]
    first = torch.zeros(sum(room), dtype=parameters[0].dtype, device=parameters[0].device)
    parts = first.split(room)
    return [part[: each.numel()].view(each.shape) for part, each in zip(parts, parameters, strict=True)]
