"""Every state change is one event. The screen, `--json` and a run's events.ndjson are views of the same events."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash_ops.agent.masking import Masks
from dflash_ops.files import writing

Event = dict[str, Any]
LAST = ("error", "result")
View = Callable[[Event], None]


@dataclass
class Events:
    """Numbers events, hands them to the view, and keeps them for the run's record once there is one.

    Several threads may emit: a host is reached while a release is built, files are collected side by side.
    """

    view: View
    _sequence: int = 0
    _held: list[bytes] = field(default_factory=list)
    _file: Path | None = None
    _unkept: bool = False
    _masks: Masks = field(default_factory=Masks)
    _watchers: list[View] = field(default_factory=list)
    _ends: list[Callable[[], None]] = field(default_factory=list)
    _one_at_a_time: threading.RLock = field(default_factory=threading.RLock)

    def watch(self, watcher: View, at_end: Callable[[], None]) -> None:
        """From now on `watcher` is called with each event, after it was shown and kept; `at_end` before the result."""
        self._watchers.append(watcher)
        self._ends.append(at_end)

    def end(self) -> None:
        """The command is done, its result comes next."""
        for at_end in self._ends:
            at_end()

    def hide(self, masks: Masks) -> None:
        """From now on these secrets stand in no event, whatever part of it they would come in."""
        self._masks |= masks

    def masked(self, text: str) -> str:
        return self._masks.text(text)

    def emit(self, event: str, **facts: object) -> None:
        with self._one_at_a_time:
            self._sequence += 1
            record: Event = {
                "v": 1,
                "seq": self._sequence,
                "time": round(time.time(), 3),
                "event": event,
                **self._masks.value(facts),
            }
            self.view(record)
            self._keep(record)
            for watcher in self._watchers:
                watcher(record)

    def _keep(self, record: Event) -> None:
        if record["event"] in ("log", "progress"):
            # the log itself is collected whole; its lines are not state changes
            return
        line = json.dumps(record, default=str).encode() + b"\n"
        if self._file is None:
            self._held.append(line)
        else:
            # an error is why the command ends: that it could not be kept, too, must not take its place
            with suppress(OSError) if record["event"] in LAST else nullcontext():
                self._append(self._file, line)

    def _append(self, path: Path, data: bytes) -> None:
        """A full disk is told once: of what follows (the error, the result) the screen must still hear."""
        if self._unkept:
            return
        try:
            append(path, data)
        except OSError:
            self._unkept = True
            raise

    def keep_in(self, path: Path) -> None:
        """From now on (and for all that was held) events are appended to `path`."""
        with self._one_at_a_time:
            self._file = path
            self._append(path, b"".join(self._held))
            self._held.clear()


def append(path: Path, data: bytes) -> None:
    """One write with O_APPEND: a line is whole or absent, whoever else appends."""
    with writing(path, len(data)):
        handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(handle, data)
        finally:
            os.close(handle)
