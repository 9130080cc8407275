"""How far a long piece of work is, in the log."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

_EVERY_S = 10.0

log = logging.getLogger(__name__)


class Progress:
    """Counts `total` things, some of them `done` before; a line every ten seconds, and one at the end.

    `beat` is called with each line: where the work leaves nothing on the disk, it shows there that it goes on.
    """

    def __init__(self, what: str, total: int, done: int, beat: Callable[[], None] = lambda: None) -> None:
        self._what = what
        self._total = total
        self._beat = beat
        self._before = self._done = done
        self._began = self._told = time.monotonic()
        if done:
            log.info("%d of %d %s: from an earlier prepare", done, total, what)

    def add(self, count: int) -> None:
        """So many more are done."""
        self._done += count
        now = time.monotonic()
        if now - self._told < _EVERY_S and self._done < self._total:
            return
        self._told = now
        self._beat()
        rate = (self._done - self._before) / max(now - self._began, 1e-9)
        log.info(
            "%d of %d %s, %.1f rows/s, %s left",
            self._done,
            self._total,
            self._what,
            rate,
            _duration((self._total - self._done) / rate) if rate else "unknown time",
        )


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
