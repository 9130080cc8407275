"""The loss that a run would write down, against the one that was seen of each worker at once."""

from __future__ import annotations

import math
from collections.abc import Sequence

from trainer.board import StepReport
from trainer.canary.evidence import Check, Outcome
from trainer.canary.witness import WorkerRecord

# float32 sums over micro-batches, in another order; one that is missing or stale is off by far more
_ALLOWED = 1e-5


class ReportedLoss:
    """Takes the step board's reports; `look` while all workers stand still after the step, and before the judge."""

    def __init__(self, workers: Sequence[WorkerRecord]) -> None:
        self._workers = workers
        self._last: StepReport | None = None
        self._trouble: str | None = None
        self._looks = 0

    def write(self, report: StepReport) -> None:
        """The board's `write`."""
        self._last = report

    def look(self, done: int) -> None:
        """After `done` steps."""
        report, self._last = self._last, None
        self._looks += 1
        steps = [worker.step for worker in self._workers]
        seen = sum(sum(each.loss_sums) for each in steps) / sum(sum(each.weight_sums) for each in steps)
        if report is None or report.step != done:
            self._say(f"step {done} was not reported")
        elif not math.isclose(report.loss, seen, rel_tol=_ALLOWED):
            self._say(
                f"step {done} was reported with loss {report.loss:.6f}, and its micro-batches had {seen:.6f}: "
                "copy what a graph gives back, and sum over all micro-batches and workers"
            )

    def report(self) -> list[Check]:
        """`reported_loss`; nothing where no step was taken."""
        if not self._looks:
            return []
        outcome = Outcome.FAIL if self._trouble else Outcome.PASS
        good = f"the mean over all workers and micro-batches, at each of {self._looks} steps"
        return [Check("reported_loss", None, outcome, self._trouble or good)]

    def _say(self, trouble: str) -> None:
        self._trouble = self._trouble or trouble
