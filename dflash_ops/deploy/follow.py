"""Following a run from a cursor: a broken link is met again from where it was; nothing is lost, nothing repeated."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dflash_ops.deploy.chain import Teller
from dflash_ops.deploy.lines import LineSplitter
from dflash_ops.deploy.reconnect import reconnecting
from dflash_ops.deploy.session import Session
from dflash_ops.transport import Conversation

STREAMS = ("log", "metrics")

Cursor = dict[str, int]


@dataclass
class Cursors:
    """How far each stream was read: generation (which file) and byte offset in it."""

    log: Cursor = field(default_factory=lambda: {"generation": 0, "offset": 0})
    metrics: Cursor = field(default_factory=lambda: {"generation": 0, "offset": 0})

    def moved(self, stream: int, count: int) -> None:
        self.named(STREAMS[stream])["offset"] += count

    def named(self, name: str) -> Cursor:
        return self.log if name == "log" else self.metrics


def follow(
    session: Session,
    run: str | None,
    *,
    wait: bool,
    on_line: Callable[[str], None],
    on_step: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """Every log line and every metrics record of `run` once, in order. Returns the run's status at the end.

    With `wait` it ends when the run has ended, its host has decided whether to start it again, and all is read. A
    broken link is met again (deploy/reconnect.py).
    """
    cursors = Cursors()
    lines = LineSplitter(on_line)
    records = LineSplitter(lambda text: _record(text, on_step))
    splitters = (lines, records)
    tell = Teller(session.events)

    def on_data(stream: int, data: bytes) -> None:
        splitters[stream].feed(data)
        cursors.moved(stream, len(data))

    def on_event(event: dict[str, Any]) -> None:
        tell(event)
        if event["event"] == "generation":
            cursors.named(event["stream"]).update(generation=event["generation"], offset=event["offset"])
            if event.get("skipped"):
                # in its place in the log, as the host's own files say it
                lines.close()
                on_line(f"dflash-ops: {event['skipped']}")

    def read_on(conversation: Conversation) -> dict[str, Any]:
        return conversation.request(
            "follow",
            {"run": run, "wait": wait, "cursors": {"log": cursors.log, "metrics": cursors.metrics}},
            on_data=on_data,
            on_event=on_event,
        )

    status = reconnecting(session, read_on, then="the run goes on")
    lines.close()
    return status


def _record(text: str, on_step: Callable[[dict[str, Any]], None]) -> None:
    """A damaged line of metrics (a full disk cuts one in the middle) is no reason to lose sight of the run."""
    try:
        record = json.loads(text)
    except ValueError:
        return
    if isinstance(record, dict):
        on_step(record)
