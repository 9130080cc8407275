"""What rounding does to right code, measured on the device: plain eager code against the truth, and against itself."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from trainer.canary.measure import relative, tolerance
from trainer.canary.reference import StepReference

HIDDEN, LOSS = "hidden states", "loss"

_NARROW = 0.5
"""How many times of `measure.FACTOR` is left where 8-bit numbers come of bfloat16. Every tenth may then become the
other of two, in the plain code that is measured as well; more places that round make more of them do so, and of that
their errors grow as the square root only (docs/decisions/0030)."""


def number(value: float) -> Tensor:
    """A loss sum, to be compared."""
    return torch.tensor(value, dtype=torch.float64)


class Noise:
    """Of one device: by name, the most that eager code in `dtype` was off by so far, in any step of any worker.

    Pooled, since a single measurement may hit upon a lucky rounding, most of all of one number or a short vector.
    """

    def __init__(self, dtype: torch.dtype, *, narrow: bool) -> None:
        """`narrow`: the linear layers and the head multiply 8-bit numbers (`trainer.fp8`)."""
        self._dtype = dtype
        self._share = _NARROW if narrow and dtype == torch.bfloat16 else 1.0
        self._most: dict[str, float] = {}

    def allowed(self, name: str) -> float:
        """The tolerance of what is called `name`."""
        return tolerance(self._most[name] * self._share, self._dtype)

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
