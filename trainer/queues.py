"""Bounded hand-over between target workers and one drafter, in a fixed order whoever is ready first."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from trainer.abort import Abort

_T = TypeVar("_T")


class OrderedQueue(Generic[_T]):
    """Items come out by index 0, 1, 2, ...; at most `depth` of them wait inside.

    A producer that runs ahead waits until its index is within `depth` of what the consumer takes next. So several
    producers may finish in any order, and the consumer still sees one order. Every wait ends when a worker fails.
    """

    def __init__(self, depth: int, abort: Abort) -> None:
        self._depth = depth
        self._abort = abort
        self._changed = threading.Condition()
        self._items: dict[int, _T] = {}
        self._next = 0
        self._closed = False
        abort.subscribe(self._wake)

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def put(self, index: int, item: _T) -> bool:
        """Hand over item `index`; False when the consumer has closed the queue. Raises `Aborted`."""
        with self._changed:
            self._changed.wait_for(lambda: self._abort.is_set() or self._closed or index < self._next + self._depth)
            self._abort.check()
            if self._closed:
                return False
            self._items[index] = item
            self._changed.notify_all()
            return True

    def get(self) -> _T:
        """The next item in order. Raises `Aborted`."""
        with self._changed:
            self._changed.wait_for(lambda: self._abort.is_set() or self._next in self._items)
            self._abort.check()
            item = self._items.pop(self._next)
            self._next += 1
            self._changed.notify_all()
            return item

    def close(self) -> None:
        """The consumer takes no more: producers are let go."""
        with self._changed:
            self._closed = True
            self._items.clear()
            self._changed.notify_all()

    def __len__(self) -> int:
        with self._changed:
            return len(self._items)


@dataclass(frozen=True)
class Assignment:
    """Make micro-batch `micro` of optimiser step `step` for drafter `worker`; `index` is its place in that queue."""

    step: int
    micro: int
    worker: int
    index: int


class Assignments:
    """What is to be made, handed to whichever target worker asks, in the order in which drafters need it."""

    def __init__(self, first_step: int, last_step: int, accumulation: int, workers: int) -> None:
        self._lock = threading.Lock()
        self._left: Iterator[Assignment] = (
            Assignment(step, micro, worker, (step - first_step) * accumulation + micro)
            for step in range(first_step, last_step)
            for micro in range(accumulation)
            for worker in range(workers)
        )

    def take(self) -> Assignment | None:
        """The next one, or None when all are handed out."""
        with self._lock:
            return next(self._left, None)
