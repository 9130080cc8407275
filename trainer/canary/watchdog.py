"""A hang must end: every thread's stack to the log, what is known on disk, exit."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
from collections.abc import Callable
from types import TracebackType

from trainer.canary.evidence import Check, Evidence, Outcome


class Watchdog:
    """While the block runs, `seconds` are left; then `last_words` gets what to say, and gives the exit code."""

    def __init__(self, what: str, seconds: int, last_words: Callable[[str], int]) -> None:
        self._what = what
        self._seconds = seconds
        self._last_words = last_words
        self._timer = threading.Timer(seconds, self._bite)
        self._timer.name = "watchdog"
        self._timer.daemon = True

    def _bite(self) -> None:
        late = f"{self._what}: not done after {self._seconds} s"
        print(f"{late}; the stack of every thread:", file=sys.stderr, flush=True)
        # called by a thread that holds the GIL, so that no other thread's frames move meanwhile
        faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
        summary = f"not done after {self._seconds} s (workload.canary_timeout_s); every stack is in the log"
        code = self._last_words(summary)
        sys.stdout.flush()
        sys.stderr.flush()
        # a hung thread would keep an ordinary exit waiting
        os._exit(code)

    def __enter__(self) -> None:
        self._timer.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()


def told_to(evidence: Evidence) -> Callable[[str], int]:
    """The last words of a canary: a failed check, and its evidence on disk."""

    def tell(summary: str) -> int:
        evidence.add(Check("watchdog", None, Outcome.FAIL, summary))
        return evidence.write("")

    return tell
