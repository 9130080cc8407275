"""Signs of life of a run that prepares data: what lies directly in the data's folder changes as it goes on.

There are no metrics before there is training; what a `prepare` has done it writes there (docs/trainer-contract.md).
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Callable, Optional, Set, Tuple

from .watch import STALLED, Trouble

_LOOK_S = 5.0


class Growth:
    """As `Watch`, over a folder. It may stand still for the longer of the two, and for ever where one is 0: whether a
    target is being loaded or asked cannot be seen from there."""

    good_step: Optional[int] = None
    """No step is ever made."""

    def __init__(
        self, folder: Path, *, stall_s: float, first_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._folder = folder
        self._patience_s, self._name = max((stall_s, "stall_s"), (first_s, "first_step_s"))
        self._ends = bool(stall_s and first_s)
        self._clock = clock
        self._life = self._looked = clock()
        self._seen = self._content()

    def look(self) -> Optional[Trouble]:
        """Whether it stands still now."""
        now = self._clock()
        # before it is called dead it is looked at, however short its time is
        if now - self._looked >= _LOOK_S or self._overdue(now):
            self._looked = now
            content = self._content()
            if content != self._seen:
                self._seen, self._life = content, now
        if not self._overdue(now):
            return None
        silent = now - self._life
        what = f"nothing was prepared for {silent:.0f} s ({self._name} is {self._patience_s:g})"
        return Trouble(STALLED, what, seconds=round(silent, 1))

    def sickness(self) -> Optional[Trouble]:
        """Data that are not right are the trainer's to tell."""
        return None

    def excuse(self, seconds: float) -> None:
        """Time in which nobody looked."""
        self._life += seconds

    def _overdue(self, now: float) -> bool:
        return self._ends and now - self._life >= self._patience_s

    def _content(self) -> Set[Tuple[str, int, int]]:
        found = set()
        with contextlib.suppress(OSError):
            for entry in os.scandir(self._folder):
                with contextlib.suppress(OSError):
                    status = entry.stat(follow_symlinks=False)
                    found.add((entry.name, status.st_size, status.st_mtime_ns))
        return found
