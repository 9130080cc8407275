"""How far a worker's numbers are from the truth, and how far they may be.

The truth is computed in float64. What rounding alone does is measured on the same device: plain eager code in the
worker's own dtype, against the same truth. A worker may be `FACTOR` times as far away (kernels sum in other orders),
and never has to be closer than `FACTOR` roundings of its dtype.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

FACTOR = 8.0


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
        return self.worst / self.allowed if self.worst == self.worst else float("inf")


def relative(found: Tensor, truth: Tensor, scale: Tensor | None = None) -> float:
    """|found - truth| / |scale| in the L2 norm and float64; `scale` is `truth` by default. Shapes must agree."""
    if found.shape != truth.shape:
        raise ValueError(f"shapes {tuple(found.shape)} and {tuple(truth.shape)} cannot be compared")
    wide = truth.double()
    off = float(torch.linalg.vector_norm(found.double() - wide))
    size = float(torch.linalg.vector_norm(wide if scale is None else scale.double()))
    return off / size if size > 0 else off


def tolerance(noise: float, dtype: torch.dtype) -> float:
    """What a worker is allowed, from what eager code in the same dtype is off by."""
    return FACTOR * max(noise, torch.finfo(dtype).eps)


def compare(
    found: Mapping[str, Tensor], plain: Mapping[str, Tensor], truth: Mapping[str, Tensor], dtype: torch.dtype
) -> list[Distance]:
    """Each named tensor of a worker against the truth; `plain` is eager code's, which sets the tolerance."""
    if found.keys() != truth.keys():
        raise ValueError(f"names differ: {sorted(found.keys() ^ truth.keys())[:3]}")
    return [
        Distance(name, relative(found[name], truth[name]), tolerance(relative(plain[name], truth[name]), dtype))
        for name in truth
    ]


def worst(distances: list[Distance]) -> Distance:
    """The one that uses most of its tolerance."""
    return max(distances, key=lambda each: each.share)
