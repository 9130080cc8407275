"""SIGTERM to a run: stop after the step, with a checkpoint."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def stopped_by_term(stop: threading.Event) -> Iterator[None]:
    """Set `stop` at SIGTERM, inside the block, which is the main thread's."""

    def on_term(number: int, frame: Any) -> None:
        stop.set()

    before = signal.signal(signal.SIGTERM, on_term)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class TermAfter(threading.Event):
    """An event that is asked before each step, and sends this process SIGTERM before step number `steps`."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self._left = steps

    def is_set(self) -> bool:
        """Whether the signal has come."""
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        self._left -= 1
        return super().is_set()
