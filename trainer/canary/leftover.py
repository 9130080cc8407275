"""What the gate leaves behind: the rehearsal needs the room that the run will have."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from trainer.canary.evidence import Check, Outcome
from trainer.canary.witness import WorkerRecord

# cuBLAS keeps a workspace of up to 32 MiB for each thread and stream that used it, and a second one for its Lt part
_SLACK_BYTES_A_THREAD = 64 << 20


class Leftover:
    """Made before the gate; `follow` what it builds; `check` when everything of it is let go."""

    def __init__(self) -> None:
        self._before = _allocated()
        self._parameters: list[weakref.ref[Tensor]] = []
        self._threads = 0

    def follow(self, workers: Sequence[WorkerRecord]) -> None:
        """Remember, without holding them, what must be gone afterwards."""
        # and this thread, and autograd's
        self._threads = len(workers) + 2
        for worker in workers:
            if worker.replica is not None:
                self._parameters += [weakref.ref(each) for each in worker.replica.drafter.parameters()]

    def allow(self, threads: int) -> None:
        """So many more have worked since, each with a stream of its own."""
        self._threads += threads

    def check(self) -> Check:
        """`memory_back`. A warning: the run is not wrong by it, but its rehearsal has less room than the run."""
        alive = sum(each() is not None for each in self._parameters)
        figures: dict[str, float] = {"parameters": len(self._parameters), "alive": alive}
        if alive:
            what = f"{alive} of {len(self._parameters)} parameters of the gate's replicas are still held"
            return Check("memory_back", None, Outcome.WARN, what, figures)
        slack = self._threads * _SLACK_BYTES_A_THREAD
        for index, now in _allocated().items():
            more = now - self._before.get(index, 0)
            figures[f"cuda_{index}_bytes"] = more
            if more > slack:
                what = f"cuda:{index}: {more} bytes more than before the gate, {slack} allowed"
                return Check("memory_back", None, Outcome.WARN, what, {**figures, "allowed_bytes": slack})
        return Check("memory_back", None, Outcome.PASS, "everything that the gate built is let go", figures)


def _allocated() -> dict[int, int]:
    """Bytes by CUDA device; none where CUDA was not used."""
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return {}
    return {index: torch.cuda.memory_allocated(index) for index in range(torch.cuda.device_count())}
