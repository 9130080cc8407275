"""A run that crashed may go on under another name, started by its host: whoever follows it goes along."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from dflash_ops.deploy.events import Events


def through_restarts(
    run: str | None, look: Callable[[str | None], dict[str, Any]], events: Events
) -> Iterator[dict[str, Any]]:
    """The last status of `run` (None: the latest), then that of each restart of it.

    `look` returns one's once it has ended; a status that is `timed_out` is the last.
    """
    while True:
        status = look(run)
        if status.get("timed_out"):
            yield status
            return
        events.emit("ended", run=status["run"], state=status["state"], exit=status["exit"])
        yield status
        following = status["next"]
        if following is None or following["kind"] != "restart":
            return
        if following["run"] is None:
            events.emit("not_restarted", run=status["run"], why=following["why"])
            return
        events.emit("restarted", run=status["run"], child=following["run"], left=following["left"])
        run = following["run"]


class Teller:
    """Passes the agent's words on that a run waits to be started again, or that its disk is nearly full: once each,
    also where a link that broke was met again."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._told: set[tuple[str, str]] = set()

    def __call__(self, event: dict[str, Any]) -> None:
        keys = TOLD.get(event["event"])
        if keys is None or (event["event"], str(event["run"])) in self._told:
            return
        self._told.add((event["event"], str(event["run"])))
        self._events.emit(event["event"], **{key: event[key] for key in keys})


TOLD = {"starts_again": ("run", "state", "due", "left"), "disk_low": ("run", "what")}
