"""How far a worker's numbers are from the truth, and how far they may be.

The truth is computed in float64. What rounding does to right code is measured on the same device: plain eager code in
the worker's own dtype against that truth, and against itself in another order of summation (`noise.Noise`). A worker
may be `FACTOR` times as far away, and never has to be closer than `FACTOR` roundings of its dtype.

Why a factor is left at all: the measurement is of eager kernels, and of two orders out of many. Compiled kernels round
in other places as well: they keep in float32 what eager code writes down in bfloat16, and the other way round (the
weights of an attention), and sum a whole batch where the reference sums groups. Each such place is of the size of
those that are measured, and there are not many times as many of them. A wrong computation is further away by orders of
magnitude; `perturbation` proves each time that an error of a few tolerances is seen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

FACTOR = 6.0


@dataclass(frozen=True)
class Distance:
    """Of one named tensor: `worst` is relative in the L2 norm, `allowed` its tolerance."""

    name: str
    worst: float
    allowed: float

    @property
    def good(self) -> bool:
        """Within the tolerance; NaN is not."""
        return self.worst <= self.allowed

    @property
    def share(self) -> float:
        """How much of the tolerance is used; infinite for NaN."""
        return self.worst / self.allowed if self.worst == self.worst and self.allowed > 0 else float("inf")


def relative(found: Tensor, truth: Tensor, scale: Tensor | None = None) -> float:
    """|found - truth| / |scale| in the L2 norm and float64; `scale` is `truth` by default. Shapes must agree.

    Computed on the device of `truth`.
    """
    if found.shape != truth.shape:
        raise ValueError(f"shapes {tuple(found.shape)} and {tuple(truth.shape)} cannot be compared")
    wide = truth.detach().double()
    off = float(torch.linalg.vector_norm(found.detach().to(wide.device).double() - wide))
    size = float(torch.linalg.vector_norm(wide if scale is None else scale.detach().double()))
    return off / size if size > 0 else off


def tolerance(noise: float, dtype: torch.dtype) -> float:
    """What a worker is allowed, from what right code in the same dtype is off by."""
    return FACTOR * max(noise, torch.finfo(dtype).eps)


def compare(
    found: Mapping[str, Tensor], truth: Mapping[str, Tensor], allowed: Callable[[str], float]
) -> list[Distance]:
    """Each named tensor of a worker against the truth; `allowed`: each name's tolerance."""
    if found.keys() != truth.keys():
        raise ValueError(f"names differ: {sorted(found.keys() ^ truth.keys())[:3]}")
    return [Distance(name, relative(found[name], truth[name]), allowed(name)) for name in truth]


def worst(distances: list[Distance]) -> Distance:
    """The one that uses most of its tolerance."""
    return max(distances, key=lambda each: each.share)
