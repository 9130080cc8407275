"""How far two results are apart, and how far they may be."""

from __future__ import annotations

from dataclasses import dataclass

from .model import Parameters

FACTOR = 64.0
"""A worker may be this many times further away than the same sums in another order."""
FLOOR = 1e-13
"""Sums of a few terms may round the same way in any order."""


@dataclass(frozen=True)
class Distance:
    """The worst relative difference, and the name of the part that has it."""

    worst: float
    name: str


def vectors(values: list[float], truth: list[float]) -> float:
    """Return max |a - b| / max |b|."""
    if len(values) != len(truth):
        return float("inf")
    scale = max((abs(value) for value in truth), default=0.0) or 1.0
    return max((abs(a - b) for a, b in zip(values, truth)), default=0.0) / scale


def named(values: Parameters, truth: Parameters) -> Distance:
    """Compare by name; relative to each part's own largest value."""
    if values.keys() != truth.keys():
        return Distance(float("inf"), "names")
    worst: dict[str, float] = {name: vectors(values[name], truth[name]) for name in truth}
    name = max(worst, key=lambda key: worst[key])
    return Distance(worst[name], name)


def rows(values: list[list[float]], truth: list[list[float]]) -> Distance:
    """Compare lists of logits."""
    flat_values = {"logits": [v for row in values for v in row]}
    return named(flat_values, {"logits": [v for row in truth for v in row]})


def tolerance(noise: float) -> float:
    """Return what is allowed, from what summation order alone does."""
    return max(FACTOR * noise, FLOOR)
