"""The process-wide gate: build, compile, warm up and capture one worker at a time; then all start together."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import torch

from trainer.abort import Abort
from trainer.collector import keep_from_collector, paused_collector
from trainer.errors import Aborted

_LOCK = threading.Lock()
_LOOK_UP_S = 0.2
_holder: str | None = None


class GateShutError(RuntimeError):
    """Work that belongs behind the gate began before it opened."""


def gate_holder() -> str | None:
    """The worker that is inside the gate now, or None."""
    return _holder


class Gate:
    """`parties` workers pass; `on_open` runs once, in one of them, before any is let out.

    The lock is the process's, not the gate's: two gates in one process exclude each other as well.
    """

    def __init__(self, parties: int, abort: Abort, *, on_open: Callable[[], None] | None = None) -> None:
        self._abort = abort
        self._on_open = on_open
        self._opened = False
        self._barrier = threading.Barrier(parties, action=self._open)
        abort.subscribe(self._barrier.abort)

    @contextlib.contextmanager
    def exclusive(self, worker: str) -> Iterator[None]:
        """Alone in the process: for everything from building a model to its last capture."""
        global _holder
        # a holder that hangs never releases: keep looking whether the run is over
        while not _LOCK.acquire(timeout=_LOOK_UP_S):
            self._abort.check()
        try:
            self._abort.check()
            _holder = worker
            yield
        finally:
            _holder = None
            _LOCK.release()

    def _open(self) -> None:
        if self._on_open is not None:
            self._on_open()
        self._opened = True

    def check_open(self, worker: str) -> None:
        """For a worker that is about to use a device. Raises `GateShutError` while others may still capture."""
        if not self._opened:
            raise GateShutError(
                f"{worker} began its work before the gate opened: eager work breaks another thread's capture; "
                "call Gate.pass_through first"
            )

    def pass_through(self) -> None:
        """Wait until all parties are here. Raises `Aborted` if a worker failed."""
        try:
            self._barrier.wait()
        except threading.BrokenBarrierError:
            self._abort.check()
            raise Aborted("the gate was broken by its opening action") from None


@contextlib.contextmanager
def steady_phase() -> Iterator[Callable[[], None]]:
    """Round the lives of all workers. Gives a Gate's `on_open`, which forbids any further compile until the block ends.

    `fail_on_recompile` is process-global: a shape or a weight that moved then raises in the worker that it
    belongs to, where it would otherwise fall back to slow or wrong code in silence. Until the gate opens the garbage
    collector rests; what was compiled, and what its workers leave behind, it never looks at.
    """
    with contextlib.ExitStack() as building:
        building.enter_context(paused_collector())

        def begin() -> None:
            torch.compiler.set_stance("fail_on_recompile")
            keep_from_collector()
            building.close()

        try:
            yield begin
        finally:
            torch.compiler.set_stance("default")
            # the workers have ended, and their compiled steps with them
            keep_from_collector()
