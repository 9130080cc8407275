"""The exchange between replicas: the middle part of a training step.

Each replica's gradients are already divided by the weight sum of *all* replicas (`step.TrainingStep`), so what
averages them is their sum. This is the place where an exchange between hosts would come in.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from trainer.abort import Abort
from trainer.errors import Aborted


class Exchange(Protocol):
    """What a drafter worker calls; every replica calls the same methods in the same order."""

    def open(self) -> None:
        """Get ready, once, before the first exchange; nothing else runs in the process meanwhile."""
        ...

    def scalars(self, worker: int, values: Sequence[float]) -> list[float]:
        """Sums over replicas, the same numbers everywhere."""
        ...

    def gradients(self, worker: int, gradients: Sequence[Tensor]) -> None:
        """Sum over replicas, in place, the same bits everywhere. Shapes and order agree between replicas."""
        ...


class ThreadExchange:
    """Replicas are threads of this process, on any devices.

    Always summed in worker order, whoever is first, so a run repeats bit for bit. The tensors are dealt out to the
    threads; each is summed on the first worker's device and copied back. No device is ever synchronised: events order
    the streams. Between GPUs `nccl_exchange.NcclExchange` is faster. `between`: see `nccl_exchange.exchange_between`.
    """

    def __init__(self, replicas: int, abort: Abort, between: Callable[[int], None] | None = None) -> None:
        self._replicas = replicas
        self._abort = abort
        self._between = between
        self._barrier = threading.Barrier(replicas)
        abort.subscribe(self._barrier.abort)
        # two sets of slots: a fast worker may post the next values while a slow one still reads the last
        self._values: tuple[list[list[float]], list[list[float]]] = (
            [[] for _ in range(replicas)],
            [[] for _ in range(replicas)],
        )
        self._calls = [0] * replicas
        self._gradients: list[Sequence[Tensor]] = [()] * replicas
        self._posted: list[list[torch.cuda.Event]] = [[] for _ in range(replicas)]
        self._summed: list[list[torch.cuda.Event]] = [[] for _ in range(replicas)]

    def open(self) -> None:
        """See `Exchange`. Nothing is to be made."""

    def _meet(self) -> None:
        try:
            self._barrier.wait()
        except threading.BrokenBarrierError:
            self._abort.check()
            raise Aborted("the exchange was broken") from None

    def _all_are_there(self, worker: int) -> None:
        if self._between is not None:
            self._between(worker)

    def scalars(self, worker: int, values: Sequence[float]) -> list[float]:
        """See `Exchange`. Sums of Python floats in worker order."""
        slots = self._values[self._calls[worker] % 2]
        self._calls[worker] += 1
        slots[worker] = list(values)
        self._meet()
        return [sum(column) for column in zip(*slots, strict=True)]

    def _dealt(self, gradients: Sequence[Tensor]) -> Sequence[Tensor]:
        whole = merged(gradients)
        return whole[0].chunk(self._replicas) if len(whole) == 1 else whole

    def gradients(self, worker: int, gradients: Sequence[Tensor]) -> None:
        """See `Exchange`."""
        if self._replicas == 1:
            return
        self._gradients[worker] = gradients
        self._posted[worker] = _record(_cuda_devices(gradients[:1]))
        self._meet()
        self._all_are_there(worker)
        replicas = [self._dealt(each) for each in self._gradients]
        devices = _cuda_devices([each[0] for each in replicas])
        _wait(devices, self._posted)
        with torch.no_grad():
            for index in range(worker, len(replicas[0]), self._replicas):
                total = replicas[0][index]
                for other in replicas[1:]:
                    total.add_(other[index].to(total.device, non_blocking=True))
                for other in replicas[1:]:
                    other[index].copy_(total, non_blocking=True)
        self._summed[worker] = _record(devices)
        self._meet()
        _wait(_cuda_devices(gradients[:1]), self._summed)


def merged(gradients: Sequence[Tensor]) -> Sequence[Tensor]:
    """The one tensor that they are views of, if there is one: the fewer the calls, the less a small sum costs."""
    whole = gradients[0]._base
    return [whole] if whole is not None and all(each._base is whole for each in gradients) else gradients


def _cuda_devices(tensors: Sequence[Tensor]) -> list[torch.device]:
    return list(dict.fromkeys(each.device for each in tensors if each.device.type == "cuda"))


def _record(devices: Sequence[torch.device]) -> list[torch.cuda.Event]:
    return [torch.cuda.current_stream(device).record_event() for device in devices]


def _wait(devices: Sequence[torch.device], posted: Sequence[Sequence[torch.cuda.Event]]) -> None:
    for device in devices:
        stream = torch.cuda.current_stream(device)
        for events in posted:
            for event in events:
                stream.wait_event(event)
