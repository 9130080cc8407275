"""Events of several threads: each is shown whole before the next, and their numbers are those of that order."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from dflash_ops.deploy.events import Event, Events
from dflash_ops.files import NoRoom


def test_an_event_waits_until_the_one_before_it_was_shown() -> None:
    told: list[str] = []
    second_began = threading.Event()

    def view(event: Event) -> None:
        told.append(f"{event['event']} {event['seq']}")
        if event["event"] == "first":
            other.start()
            # it comes only where nothing holds it back
            second_began.wait(0.5)
        else:
            second_began.set()
        told.append(f"end of {event['event']}")

    events = Events(view)
    other = threading.Thread(target=events.emit, args=("second",))
    events.emit("first")
    other.join()
    assert told == ["first 1", "end of first", "second 2", "end of second"]


def test_what_can_be_kept_no_more_is_raised_once_and_shown_all_the_same(tmp_path: Path) -> None:
    told: list[str] = []
    events = Events(lambda event: told.append(event["event"]))
    file = tmp_path / "events.ndjson"
    file.symlink_to("/dev/full")
    events.emit("first")
    with pytest.raises(NoRoom) as caught:
        events.keep_in(file)
    assert caught.value.filename == str(file) and caught.value.needed
    events.emit("error")
    events.emit("result")
    assert told == ["first", "error", "result"]
