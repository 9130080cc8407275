"""Where all workers stop between two steps, for as long as the canary looks at them."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

from trainer.abort import Abort
from trainer.errors import Aborted

_LOOK_S = 0.005


class Standstill:
    """`workers` threads call `stop`; one more thread calls `wait_for_all`, looks, and calls `let_go`.

    All are let go at once: what each of them does first, they do together.
    """

    def __init__(self, workers: int, abort: Abort) -> None:
        self._workers = workers
        self._abort = abort
        self._all_here = threading.Barrier(workers + 1)
        self._go = threading.Barrier(workers + 1)
        abort.subscribe(self._all_here.abort)
        abort.subscribe(self._go.abort)

    def stop(self) -> None:
        """In a worker, with nothing of its own left running on its device. Raises `Aborted` if a worker failed."""
        try:
            self._all_here.wait()
            self._go.wait()
        except threading.BrokenBarrierError:
            self._abort.check()
            raise Aborted("the standstill between two steps was broken") from None

    def wait_for_all(self, working: Callable[[], bool]) -> bool:
        """True once every worker has stopped; False if one failed, or if they are not all `working` any more."""
        while self._all_here.n_waiting < self._workers:
            if self._all_here.broken or not working():
                # those that did stop must not wait for one that has ended
                self._all_here.abort()
                return False
            time.sleep(_LOOK_S)
        return _passed(self._all_here)

    def let_go(self) -> bool:
        """All go on; False if one failed."""
        return _passed(self._go)


def _passed(barrier: threading.Barrier) -> bool:
    with contextlib.suppress(threading.BrokenBarrierError):
        barrier.wait()
        return True
    return False
