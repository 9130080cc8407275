"""Warm-up leaves the default generators as they were; who drew from them meanwhile is told."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import TracebackType

import torch

_lock = threading.Lock()
_logs: list[DrawLog] = []


@dataclass(frozen=True)
class Draw:
    """The default generator of `device` was drawn from while `thread` was inside `generators_put_back`."""

    thread: str
    device: str


class DrawLog:
    """Records every `Draw` in this process while the block runs."""

    def __init__(self) -> None:
        self.draws: list[Draw] = []

    def __enter__(self) -> DrawLog:
        with _lock:
            _logs.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with _lock:
            _logs.remove(self)


@contextlib.contextmanager
def generators_put_back(devices: Iterable[torch.device]) -> Iterator[None]:
    """Put the default generators of the CPU and of those of `devices` that are CUDA's back as they were.

    Inside the gate, where no other thread draws. What Dynamo itself puts back after a compile is not seen. After a
    failure nothing is put back: a device whose capture failed is not to be touched again.
    """
    cuda = sorted({each.index or 0 for each in devices if each.type == "cuda"})
    cpu_before, cuda_before = torch.get_rng_state(), [torch.cuda.get_rng_state(index) for index in cuda]
    yield
    drawn = []
    if not torch.equal(torch.get_rng_state(), cpu_before):
        drawn.append("cpu")
        torch.set_rng_state(cpu_before)
    for index, before in zip(cuda, cuda_before, strict=True):
        if not torch.equal(torch.cuda.get_rng_state(index), before):
            drawn.append(f"cuda:{index}")
            torch.cuda.set_rng_state(before, index)
    thread = threading.current_thread().name
    with _lock:
        for log in _logs:
            log.draws += [Draw(thread, device) for device in drawn]
