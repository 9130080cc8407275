"""Waiting for a run's end, in few words."""

from __future__ import annotations

import time
from typing import Any

from dflash_ops.deploy.reconnect import GIVE_UP_S, reconnecting
from dflash_ops.deploy.session import Session
from dflash_ops.errors import ExitCode, OpsError
from dflash_ops.transport import Conversation


def wait(session: Session, run: str | None, *, timeout_s: float | None) -> dict[str, Any]:
    """The status of `run` (None: the latest) once it has ended, or after `timeout_s` seconds: `timed_out` tells."""
    events = session.events
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    found, told = run, False

    def left() -> float | None:
        return None if deadline is None else max(0.0, deadline - time.monotonic())

    def on_event(event: dict[str, Any]) -> None:
        nonlocal found, told
        found = event["run"]
        if not told:
            events.emit("waiting", run=found)
        told = True

    def ask(conversation: Conversation) -> dict[str, Any]:
        # after a break the run is named: the latest may be another one by then
        return conversation.request("wait", {"run": found, "timeout_s": left()}, on_event=on_event)

    give_up_s = GIVE_UP_S if timeout_s is None else min(GIVE_UP_S, timeout_s)
    status = reconnecting(session, ask, then="the run goes on", give_up_s=give_up_s)
    if not status["timed_out"]:
        events.emit("ended", run=status["run"], state=status["state"], exit=status["exit"])
    return status


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
