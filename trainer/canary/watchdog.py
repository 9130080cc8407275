"""A hang must end: every thread's stack to the log, evidence on disk, exit."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
from types import TracebackType

from trainer.canary.evidence import Check, Evidence, Outcome


class Watchdog:
    """While the block runs, `seconds` are left; then the process exits with the outcome of the evidence (fail)."""

    def __init__(self, evidence: Evidence, seconds: int) -> None:
        self._evidence = evidence
        self._seconds = seconds
        self._timer = threading.Timer(seconds, self._bite)
        self._timer.name = "watchdog"
        self._timer.daemon = True

    def _bite(self) -> None:
        print(f"canary: not done after {self._seconds} s; the stack of every thread:", file=sys.stderr, flush=True)
        # called by a thread that holds the GIL, so that no other thread's frames move meanwhile
        faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
        summary = f"not done after {self._seconds} s (workload.canary_timeout_s); every stack is in the log"
        self._evidence.add(Check("watchdog", None, Outcome.FAIL, summary))
        code = self._evidence.write("")
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
