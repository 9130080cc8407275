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


def tell_wait(event: dict[str, Any], events: Events) -> None:
    """Passes the agent's word on that a run waits to be started again."""
    if event["event"] == "starts_again":
        events.emit("starts_again", **{key: event[key] for key in ("run", "state", "due", "left")})
