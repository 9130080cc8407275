"""What the threads of one job share: failures, and waits that never outlive a failure."""

from __future__ import annotations

import queue
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from typing import Any, Callable

POLL_S = 0.02


class Aborted(Exception):
    """Another worker failed; this one only unwinds."""


@dataclass(frozen=True)
class Failure:
    """A worker's name and its traceback."""

    worker: str
    traceback: str


class Team:
    """The threads of one job. `drafters` replicas step together with the coordinating thread."""

    def __init__(self, drafters: int) -> None:
        self.failures: list[Failure] = []
        self.stopping = False
        self._abort = threading.Event()
        self._stepped = threading.Barrier(drafters + 1)
        self._go = threading.Barrier(drafters + 1)
        self._barriers = [self._stepped, self._go]
        self._threads: list[threading.Thread] = []

    def barrier(self, parties: int, action: Callable[[], None] | None = None) -> threading.Barrier:
        """Return a barrier that breaks when any worker fails."""
        barrier = threading.Barrier(parties, action)
        self._barriers.append(barrier)
        return barrier

    def start(self, name: str, work: Callable[[], None]) -> None:
        """Start a worker; whatever it raises stops the whole team and is printed under its name."""

        def guarded() -> None:
            try:
                work()
            except (Aborted, threading.BrokenBarrierError):
                return
            except BaseException:
                self._fail(name, traceback.format_exc())

        thread = threading.Thread(target=guarded, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _fail(self, name: str, text: str) -> None:
        self.failures.append(Failure(name, text))
        sys.stderr.write(f"[{name}] failed\n{text}")
        sys.stderr.flush()
        self.abort()

    def abort(self) -> None:
        """Release every wait."""
        self._abort.set()
        for barrier in self._barriers:
            barrier.abort()

    def join(self) -> None:
        """Wait for all threads to end."""
        for thread in self._threads:
            thread.join()

    def stepped(self) -> None:
        """Meet at the end of a step."""
        self._stepped.wait()

    def go(self) -> bool:
        """Meet before the next step; False when the coordinator said stop."""
        self._go.wait()
        return not self.stopping

    def put(self, into: queue.Queue[Any], item: Any) -> None:
        """Put, waiting for room."""
        while True:
            self._raise_if_aborted()
            try:
                into.put(item, timeout=POLL_S)
                return
            except queue.Full:
                continue

    def get(self, source: queue.Queue[Any]) -> tuple[Any, float]:
        """Return the next item and the seconds waited for it."""
        began = time.monotonic()
        while True:
            self._raise_if_aborted()
            try:
                return source.get(timeout=POLL_S), time.monotonic() - began
            except queue.Empty:
                continue

    def _raise_if_aborted(self) -> None:
        if self._abort.is_set():
            raise Aborted
