"""Gradients averaged over the drafter threads, in worker order, so that every replica gets the same bits."""

from __future__ import annotations

from dataclasses import dataclass

from .model import Parameters, StepOutput
from .team import Team


@dataclass(frozen=True)
class Averaged:
    """The whole step: gradient of the weighted mean loss, and the sums behind it."""

    gradient: Parameters
    loss: float
    first_correct: int
    first_count: int


def average(parts: list[StepOutput]) -> Averaged:
    """Sum in order and divide by the global weight."""
    weight = sum(part.weight_sum for part in parts)
    gradient = {}
    for name in parts[0].gradient:
        columns = zip(*(part.gradient[name] for part in parts))
        gradient[name] = [sum(column) / weight for column in columns]
    return Averaged(
        gradient,
        sum(part.loss_sum for part in parts) / weight,
        sum(part.first_correct for part in parts),
        sum(part.first_count for part in parts),
    )


class Exchange:
    """A meeting point for `drafters` threads."""

    def __init__(self, team: Team, drafters: int) -> None:
        self._parts: list[StepOutput | None] = [None] * drafters
        self._averaged: Averaged | None = None
        self._meet = team.barrier(drafters, self._merge)

    def _merge(self) -> None:
        self._averaged = average([part for part in self._parts if part is not None])

    def average(self, worker: int, part: StepOutput) -> Averaged:
        """Hand in one worker's sums; return the average once all have.

        Safe to call again once the team has met at the end of the step.
        """
        self._parts[worker] = part
        self._meet.wait()
        assert self._averaged is not None
        return self._averaged
