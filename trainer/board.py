"""Where drafter workers post what one step gave, until all are there and the step can be written down."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trainer.errors import Diverged


@dataclass(frozen=True)
class WorkerReport:
    """One worker's part of a step: `sums` as `StepStats.numbers`, `samples` row ids, `wait_s` spent on the queue."""

    worker: int
    samples: tuple[int, ...]
    wait_s: float
    sums: tuple[float, ...]
    grad_norm: float
    learning_rate: float


@dataclass(frozen=True)
class StepReport:
    """A whole step, over all workers. `step` counts from 1: optimiser steps done."""

    step: int
    loss: float
    first_slot_accuracy: float
    learning_rate: float
    grad_norm: float
    workers: tuple[WorkerReport, ...]

    @property
    def samples(self) -> int:
        """Rows of this step."""
        return sum(len(each.samples) for each in self.workers)


class StepBoard:
    """Collects the reports of `workers` workers; `write` is called with each whole step, in the last one's thread.

    No worker can be a step ahead of a report that is missing: the exchange holds it.
    """

    def __init__(self, workers: int, write: Callable[[StepReport], None]) -> None:
        self._workers = workers
        self._write = write
        self._lock = threading.Lock()
        self._open: dict[int, list[WorkerReport]] = {}

    def post(self, step: int, report: WorkerReport) -> None:
        """Add one worker's part. Raises `Diverged` where the step's loss or gradient is not finite."""
        with self._lock:
            reports = self._open.setdefault(step, [])
            reports.append(report)
            if len(reports) < self._workers:
                return
            del self._open[step]
            self._write(combine(step, sorted(reports, key=lambda each: each.worker)))


def combine(step: int, reports: Sequence[WorkerReport]) -> StepReport:
    """One step from its workers' parts. Raises `Diverged`."""
    loss_sum, weight_sum, correct, count = (
        sum(column) for column in zip(*(each.sums for each in reports), strict=True)
    )
    loss = loss_sum / weight_sum
    norm = reports[0].grad_norm
    if not math.isfinite(loss) or not math.isfinite(norm):
        raise Diverged(f"step {step}: loss {loss}, gradient norm {norm}: lower training.learning_rate")
    return StepReport(
        step=step,
        loss=loss,
        first_slot_accuracy=correct / count if count else 0.0,
        learning_rate=reports[0].learning_rate,
        grad_norm=norm,
        workers=tuple(reports),
    )
