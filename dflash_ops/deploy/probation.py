"""The first steps of a run that is left alone: only then is leaving it safe."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from dflash_ops.deploy.endings import cause, what_next
from dflash_ops.deploy.events import Events
from dflash_ops.deploy.follow import follow
from dflash_ops.deploy.session import Session
from dflash_ops.errors import ExitCode, OpsError, TransportError


class _Passed(Exception):  # noqa: N818
    """Enough was seen: nothing more needs to be read."""


@dataclass(frozen=True)
class Seen:
    """`done` of the `steps` were seen; `status` is the run's at its end, None where it goes on."""

    run: str
    steps: int
    done: int
    status: dict[str, Any] | None

    @property
    def state(self) -> str:
        return "RUNNING" if self.status is None else str(self.status["state"])

    def refuse_bad_end(self, where: str) -> None:
        """Raises OpsError (exit 8) with the end of its log, unless it goes on or SUCCEEDED."""
        if self.status is None or self.state == "SUCCEEDED":
            return
        because = f": {reason}" if (reason := cause(self.status)) else ""
        raise OpsError(
            f"run {self.run} ended {self.state} in its probation, after {self.done} of {self.steps} steps{because}",
            exit_code=ExitCode.RUN_FAILED,
            kind="probation",
            where=where,
            fix=_what_next(self.run, self.status),
            evidence=self.status.get("evidence"),
        )


def probation(session: Session, run: str, steps: int, events: Events) -> Seen:
    """Waits until `run` has recorded `steps` steps with a finite loss, or has ended.

    Raises TransportError when the link cannot be met again: the run goes on then.
    """
    done = 0

    def tell(step: object = None, loss: object = None) -> None:
        events.emit("probation", run=run, done=done, of=steps, step=step, loss=loss)

    def on_record(record: dict[str, Any]) -> None:
        nonlocal done
        loss = record.get("loss")
        if record.get("kind") != "step" or not isinstance(loss, int | float) or not math.isfinite(loss):
            return
        done += 1
        tell(record.get("step"), loss)
        if done >= steps:
            raise _Passed

    tell()
    try:
        status = follow(session, run, wait=True, on_line=lambda line: None, on_step=on_record)
    except _Passed:
        return Seen(run, steps, done, None)
    except TransportError as error:
        error.fix = f"run {run} goes on; meet it again: `dflash-ops tail-logs -f {run}`"
        raise
    events.emit("ended", run=run, state=status["state"], exit=status["exit"])
    return Seen(run, steps, done, status)


def _what_next(run: str, status: dict[str, Any]) -> str:
    following = status.get("next") or {}
    if following.get("outcome") == "started":
        return f"its host has started it again: `dflash-ops tail-logs -f {following.get('run')}`"
    return what_next(run, status["exit"])
