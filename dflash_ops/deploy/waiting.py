"""Waiting for a run's end, in few words."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from dflash_ops.deploy.chain import Teller, through_restarts
from dflash_ops.deploy.reconnect import GIVE_UP_S, reconnecting
from dflash_ops.deploy.session import Session
from dflash_ops.errors import ExitCode, OpsError
from dflash_ops.transport import Conversation


def wait(
    session: Session, run: str | None, *, timeout_s: float | None, on_run: Callable[[str], None]
) -> dict[str, Any]:
    """The status of `run` (None: the latest) once it has ended, or after `timeout_s` seconds: `timed_out` tells.
    `on_run` gets the id of each that is waited for.

    A run that its host started again has not ended: then it is the status of what it became.
    """
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    *_, last = through_restarts(run, lambda each: _wait(session, each, deadline, on_run), session.events)
    return last


def _wait(session: Session, run: str | None, deadline: float | None, on_run: Callable[[str], None]) -> dict[str, Any]:
    found, told = run, False
    tell = Teller(session.events)

    def left() -> float | None:
        return None if deadline is None else max(0.0, deadline - time.monotonic())

    def on_event(event: dict[str, Any]) -> None:
        nonlocal found, told
        tell(event)
        found = event["run"]
        if event["event"] == "waiting" and not told:
            on_run(event["run"])
            session.events.emit("waiting", run=found)
            told = True

    def ask(conversation: Conversation) -> dict[str, Any]:
        # after a break the run is named: the latest may be another one by then
        return conversation.request("wait", {"run": found, "timeout_s": left()}, on_event=on_event)

    patience = left()
    give_up_s = GIVE_UP_S if patience is None else min(GIVE_UP_S, patience)
    return reconnecting(session, ask, then="the run goes on", give_up_s=give_up_s)


def refuse_timeout(status: dict[str, Any], where: str) -> None:
    """Raises OpsError (exit 10) where `wait` ended before the run did."""
    if status["timed_out"]:
        raise OpsError(
            f"run {status['run']} has not ended in that time",
            exit_code=ExitCode.TIMED_OUT,
            kind="timeout",
            where=where,
            fix=f"it goes on: `dflash-ops wait {status['run']}`",
        )
