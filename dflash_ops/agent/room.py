"""Whether a run's next checkpoints will find room on the disk: somebody should know before one does not."""

from __future__ import annotations

import contextlib
import time
from typing import Any, Callable, Dict, Optional

from .caches import used_bytes
from .checkpoints import Checkpoint
from .collect import UNFINISHED, checkpoints
from .disk import free_bytes
from .files import write_json
from .footprint import earlier_checkpoint
from .runs import DISK_LOW, RunFolder
from .workdir import WorkDir

_LOOK_S = 5.0
_ROOM_FOR = 2
"""Checkpoints: the next one, and one more. An old one goes only when the next is whole."""


class Room:
    """The supervisor's side. `tell` gets the words, once in the life of a run."""

    def __init__(self, folder: RunFolder, tell: Callable[[str], None]) -> None:
        self._folder = folder
        self._tell = tell
        self._next_look = 0.0
        self._before: Optional[int] = None
        self._asked = False
        self._told: Optional[Dict[str, Any]] = None

    def look(self) -> None:
        """To be called often. May raise OSError."""
        if time.monotonic() < self._next_look or (self._folder.path / DISK_LOW).exists():
            return
        self._next_look = time.monotonic() + _LOOK_S
        if self._told is None:
            self._told = self._shortage()
            if self._told is None:
                return
            self._tell(self._told["what"])
        # on a disk that is full by now this fails, and is tried again
        write_json(self._folder.path / DISK_LOW, self._told)

    def _shortage(self) -> Optional[Dict[str, Any]]:
        size = self._checkpoint_bytes()
        if not size:
            return None
        # what is being written is the next one
        free = free_bytes(self._folder.path) + self._half_written()
        if free >= _ROOM_FOR * size:
            return None
        what = f"{_mib(free)} are free on the disk of {self._folder.root} and a checkpoint takes {_mib(size)}: " + (
            "the next one does not fit" if free < size else "there is room for one"
        )
        return {"v": 1, "time": time.time(), "free_bytes": free, "checkpoint_bytes": size, "what": what}

    def _checkpoint_bytes(self) -> Optional[int]:
        """Of the newest of the run, else of the one that it began with, else of an earlier run's."""
        own = checkpoints(self._folder)
        if own:
            return own[-1].size
        if not self._asked:
            self._asked, self._before = True, self._earlier()
        return self._before

    def _earlier(self) -> Optional[int]:
        workload, module = self._folder.settings().get("workload"), self._folder.record().get("module")
        for first in filter(None, map(Checkpoint.at, self._folder.begun_with())):
            return sum(int(item.get("size", 0)) for item in first.files if isinstance(item, dict))
        if not isinstance(workload, dict):
            return None
        found = earlier_checkpoint(WorkDir(self._folder.root), str(module), workload)
        return None if found is None else found[0]

    def _half_written(self) -> int:
        total = 0
        for path in (self._folder.out / "checkpoints").glob("*"):
            if path.suffix in UNFINISHED:
                with contextlib.suppress(OSError):
                    total += used_bytes(path)
        return total


def _mib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
