"""A run comes home: once, or for as long as it goes on; its report is written from what is here."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_ops.deploy.chain import Teller, through_restarts
from dflash_ops.deploy.collecting import RUNNING, Choice, Collector
from dflash_ops.deploy.endings import doubtful
from dflash_ops.deploy.events import Events
from dflash_ops.deploy.reconnect import reconnecting
from dflash_ops.deploy.records import bringing_home, record_of
from dflash_ops.deploy.report import write_report
from dflash_ops.deploy.session import Session
from dflash_ops.errors import OpsError
from dflash_ops.files import write_json
from dflash_ops.transport import Conversation

LOOK_S = 5.0
"""Between two looks at a run that goes on."""


@dataclass(frozen=True)
class Home:
    """What came of it: the run's last status; `damaged`, where a checkpoint could not come because it is that there."""

    status: dict[str, Any]
    damaged: OpsError | None

    def refuse_damaged(self) -> None:
        if self.damaged is not None:
            raise self.damaged


def follow_home(session: Session, run: str, runs: Path, choice: Choice) -> Home:
    """Brings `run` home as it goes on, until it has ended, and what its host started again in its place."""
    damaged: list[OpsError | None] = []

    def look(each: str | None) -> dict[str, Any]:
        with session.conversation() as conversation:
            status = conversation.request("status", {"run": each})
        folder = record_of(runs, status, session.host.name)
        home = bring_home(session, status["run"], folder, session.events, choice, follow=True)
        damaged.append(home.damaged)
        return home.status

    *_, last = through_restarts(run, look, session.events)
    return Home(last, next(filter(None, damaged), None))


def bring_home(
    session: Session,
    run: str,
    folder: Path,
    events: Events,
    choice: Choice = Choice(),  # noqa: B008 -- frozen
    *,
    follow: bool = False,
    patient: bool = False,
) -> Home:
    """Collects, writes the report, and says where everything lies.

    With `follow` it goes on until the run has ended; a broken link is met again. `patient`: waits for another command
    that brings the same run here, instead of refusing (exit 9).
    """

    def tell(text: str) -> None:
        events.emit("notice", text=text)

    passed_on = Teller(events)
    with bringing_home(folder, wait=tell if patient else None):
        events.keep_in(folder / "events.ndjson")
        collector = Collector(session, run, folder, events, choice)

        def bring(conversation: Conversation) -> dict[str, Any]:
            while True:
                listing = collector.bring(conversation)
                if not follow:
                    return conversation.request("status", {"run": run})
                if listing.state != RUNNING:
                    # ends once it is decided whether its host starts it again
                    return conversation.request("wait", {"run": run}, on_event=passed_on)
                conversation.request("wait", {"run": run, "timeout_s": LOOK_S}, on_event=passed_on)

        status = reconnecting(session, bring, then="what is here is kept")
        write_json(folder / "status.json", status)
        report = write_report(folder)
    brought = collector.collected
    checkpoints = [folder / "checkpoints" / name for name in brought.checkpoints]
    events.emit(
        "collected",
        run=run,
        folder=str(folder),
        files=brought.files,
        bytes=brought.bytes,
        log=str(folder / "log"),
        metrics=_there(folder / "metrics.ndjson"),
        prepared=_there(folder / "prepare.json"),
        checkpoints=[str(path) for path in checkpoints],
        doubtful=[str(path) for path in doubtful(checkpoints, status["exit"])],
        report=str(report),
        quality=_quality(folder),
    )
    return Home(status, collector.damaged)


def _there(path: Path) -> str | None:
    return str(path) if path.exists() else None


def _quality(folder: Path) -> dict[str, Any] | None:
    try:
        result = json.loads((folder / "result.json").read_bytes())
    except (OSError, ValueError):
        return None
    found = {key: result.get(key) for key in ("before", "after")} if isinstance(result, dict) else {}
    return found if all(isinstance(value, dict) for value in found.values()) and found else None
