"""The held-out evaluation while training goes on: a thread of its own beside the target, one evaluation at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from trainer.abort import Abort
from trainer.workers import Worker


class EvaluationWorker(Worker):
    """Calls `judge(step, weights)` for what it is sent, on streams of its own of the target's devices.

    It is sent copies on the CPU, so it never touches a device or a tensor of a drafter, and the drafters go on
    meanwhile. It takes no part in the gate: nothing is sent before the first step, which comes after all captures.
    """

    def __init__(
        self,
        devices: Sequence[torch.device],
        judge: Callable[[int, dict[str, Tensor]], object],
        cpu_threads: int,
        abort: Abort,
    ) -> None:
        super().__init__("evaluation", devices[0], cpu_threads, abort, others=devices[1:])
        self._judge = judge
        self._changed = threading.Condition()
        self._sent: tuple[int, dict[str, Tensor]] | None = None
        self._closed = False
        abort.subscribe(self._wake)

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def send(self, step: int, weights: dict[str, Tensor]) -> None:
        """Have the weights of `step` judged, once the evaluation before is done: at most one copy is kept.

        So only the newest step may lack its figures. Raises `Aborted`.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._abort.is_set() or self._sent is None)
            self._abort.check()
            # on a CPU a copy must be asked for, else these are the weights that go on changing
            self._sent = (step, {name: each.detach().to("cpu", copy=True) for name, each in weights.items()})
            self._changed.notify_all()

    def close(self) -> None:
        """Nothing more will be sent: the thread ends after what it has."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def work(self) -> None:
        """See the class."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._abort.is_set() or self._closed or self._sent is not None)
                self._abort.check()
                if self._sent is None:
                    return
                step, weights = self._sent
            self._judge(step, weights)
            with self._changed:
                self._sent = None
                self._changed.notify_all()
