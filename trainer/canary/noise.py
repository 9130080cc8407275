"""What rounding does to right code, measured on the device: plain eager code against the truth, and against itself."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from trainer.canary.measure import relative
from trainer.canary.reference import StepReference

HIDDEN, LOSS = "hidden states", "loss"


def number(value: float) -> Tensor:
    """A loss sum, to be compared."""
    return torch.tensor(value, dtype=torch.float64)


class Noise:
    """Of one device: by name, the most that eager code in `dtype` was off by so far, in any step of any worker.

    Pooled, since a single measurement may hit upon a lucky rounding, most of all of one number or a short vector.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._most: dict[str, float] = {}

    def __getitem__(self, name: str) -> float:
        return self._most[name]

    def __bool__(self) -> bool:
        return bool(self._most)

    @torch.no_grad()
    def see(self, plain: StepReference, reference: StepReference) -> None:
        """`plain` against another reference of the same step: the truth, or plain code in another order."""
        for (name, found), (_, right) in zip(self._parts(plain), self._parts(reference), strict=True):
            self._most[name] = max(self._most.get(name, 0.0), relative(found, right))

    def _parts(self, reference: StepReference) -> Iterator[tuple[str, Tensor]]:
        for hidden in reference.hidden:
            yield HIDDEN, hidden
        for loss in reference.loss_sums:
            yield LOSS, number(loss)
        for name, gradient in reference.gradient.items():
            # plain code's is summed wide, and rounded once to what a worker's is kept in
            yield name, gradient if gradient.dtype == torch.float64 else gradient.to(self._dtype)
