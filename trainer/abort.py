"""One worker's failure ends them all: the first is kept, shown under its worker's name, and everyone is woken."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable

from trainer.errors import Aborted, WorkerFailed


class Abort:
    """Shared by all workers of a run. Whatever waits subscribes its wake-up, so that nothing waits for ever."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wake: list[Callable[[], None]] = []
        self._failure: WorkerFailed | None = None
        self._set = threading.Event()

    @property
    def failure(self) -> WorkerFailed | None:
        """The first worker's failure, if any."""
        return self._failure

    def is_set(self) -> bool:
        """Whether a worker has failed."""
        return self._set.is_set()

    def check(self) -> None:
        """Raise `Aborted` if a worker has failed."""
        if self._set.is_set():
            name = self._failure.worker if self._failure else "another worker"
            raise Aborted(f"stopped because {name} failed")

    def subscribe(self, wake: Callable[[], None]) -> None:
        """Call `wake` when a worker fails (at once if one has)."""
        with self._lock:
            self._wake.append(wake)
            failed = self._set.is_set()
        if failed:
            wake()

    def fail(self, worker: str, error: BaseException) -> None:
        """Report an exception. The first one is printed with its traceback; what it causes in others is not."""
        with self._lock:
            if self._failure is not None or isinstance(error, Aborted):
                return
            trace = "".join(traceback.format_exception(error))
            self._failure = WorkerFailed(worker, error, trace)
            self._set.set()
            wake = list(self._wake)
        print(f"{worker} failed:\n{trace}", end="", file=sys.stderr, flush=True)
        for each in wake:
            each()
