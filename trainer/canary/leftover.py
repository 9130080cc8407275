"""What the gate leaves behind: the rehearsal needs the room that the run will have.

Inductor's own CUDA graphs stay, and what they write to, in cycles, and the garbage collector is kept away from compiled
code (`trainer.collector`). What they write to leads through autograd to the parameters, whose memory `give_back` frees.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import nn

from trainer.canary.evidence import Check, Outcome
from trainer.canary.gate import GateRecord
from trainer.canary.witness import WorkerRecord
from trainer.replica import DrafterReplica

# cuBLAS keeps a workspace of up to 32 MiB for each thread and stream that used it, and a second one for its Lt part
_SLACK_BYTES_A_THREAD = 64 << 20


class Leftover:
    """Made before the gate; `follow` what it builds; `check` when everything of it is let go."""

    def __init__(self) -> None:
        self._before = _allocated()
        self._replicas: list[weakref.ref[DrafterReplica]] = []
        self._parameters: list[weakref.ref[nn.Parameter]] = []
        self._threads = 0
        self._kept: str | None = None

    def follow(self, record: GateRecord) -> None:
        """Remember, without holding them, what must be gone afterwards."""
        # and this thread, and autograd's
        self._threads = len(record.workers) + 2
        strategy = record.parts.strategy
        if strategy.replays_per_call and any(strategy.uses_graphs(each) for each in record.parts.placement.drafters):
            self._kept = f"the graphs of strategy {strategy.name} stay, and what they write to, until the process ends"
        for worker in record.workers:
            if worker.replica is not None:
                self._replicas.append(weakref.ref(worker.replica))
                self._parameters += [weakref.ref(each) for each in worker.replica.drafter.parameters()]

    def allow(self, threads: int) -> None:
        """So many more have worked since, each with a stream of its own."""
        self._threads += threads

    def check(self) -> Check:
        """`memory_back`: a failure where anything holds a replica or its weights' memory; other bytes are a warning.

        Where Inductor keeps graphs, other bytes are told and not judged.
        """
        more = {index: now - self._before.get(index, 0) for index, now in _allocated().items()}
        figures: dict[str, float] = {f"cuda_{index}_bytes": each for index, each in more.items()}
        replicas = sum(each() is not None for each in self._replicas)
        alive = [parameter for each in self._parameters if (parameter := each()) is not None]
        held = sum(each.untyped_storage().nbytes() > 0 for each in alive)
        figures |= {"parameters": len(self._parameters), "alive": len(alive), "held": held}
        if replicas or held:
            what = (
                f"{replicas} of the gate's {len(self._replicas)} replicas, and {held} of their "
                f"{len(self._parameters)} parameters, are still held: the rehearsal has less room than the run"
            )
            return Check("memory_back", None, Outcome.FAIL, what, figures)
        if self._kept is not None:
            what = ", ".join(f"{each / 2**20:.0f} MiB on cuda:{index}" for index, each in more.items())
            said = f"no replica of the gate is held; {self._kept}: up to {what} less room for the rehearsal"
            return Check("memory_back", None, Outcome.PASS, said, figures)
        slack = self._threads * _SLACK_BYTES_A_THREAD
        for index, each in more.items():
            if each > slack:
                what = f"cuda:{index}: {each} bytes more than before the gate, {slack} allowed"
                return Check("memory_back", None, Outcome.WARN, what, {**figures, "allowed_bytes": slack})
        return Check("memory_back", None, Outcome.PASS, "everything that the gate built is let go", figures)


def give_back(workers: Sequence[WorkerRecord]) -> None:
    """Free the GPU memory of replicas that nobody trains any more, whoever still holds them."""
    for worker in workers:
        replica = worker.trained
        for tensor in (*replica.drafter.parameters(), *replica.optimizer.tensors(), *replica.step.gradients):
            if tensor.is_cuda:
                tensor.untyped_storage().resize_(0)


def _allocated() -> dict[int, int]:
    """Bytes by CUDA device; none where CUDA was not used."""
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return {}
    return {index: torch.cuda.memory_allocated(index) for index in range(torch.cuda.device_count())}
