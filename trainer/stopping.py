"""SIGTERM to a run: it stops after the step, with a checkpoint."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

# the handler runs in the main thread, which looks up twice a second at the latest
_NOTICED_S = 60.0


class Term:
    """Whether SIGTERM has come, and how often. To be made, and listened with, in the main thread."""

    def __init__(self) -> None:
        self.count = 0
        self._come = threading.Event()

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        self.count += 1
        self._come.set()

    def is_set(self) -> bool:
        """Whether it has come."""
        return self._come.is_set()

    def wait(self) -> bool:
        """Until it has come; False where it does not within a minute."""
        return self._come.wait(_NOTICED_S)

    def listen(self) -> None:
        """From now on, for good."""
        signal.signal(signal.SIGTERM, self._note)

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Inside the block only."""
        before = signal.signal(signal.SIGTERM, self._note)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)


class TermAfter:
    """The `stop` of a run that sends its own process SIGTERM, so that the run ends after `steps` steps.

    A run asks once before its threads start, and then before each step, which it still takes.
    """

    def __init__(self, term: Term, steps: int) -> None:
        self._term = term
        self._left = steps
        self.sent = 0

    def __call__(self) -> bool:
        """Whether the signal has come; sends it, and waits for it, when its time has come."""
        if self._left == 0:
            self.sent += 1
            os.kill(os.getpid(), signal.SIGTERM)
            self._term.wait()
        self._left -= 1
        return self._term.is_set()
