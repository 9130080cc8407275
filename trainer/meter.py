"""How a worker spends its time: on the device by events of its own stream, on a CPU by the clock."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from trainer.step import Batch, StepStats, TrainingStep

What = Literal["wait", "busy"]


@dataclass(frozen=True)
class Spent:
    """Seconds of waiting and of work, and how many samples (a drafter) or tokens (a target worker) were done."""

    wait_s: float
    busy_s: float
    count: int


class Meter:
    """One worker's. Spans are its own thread's; `take` may come from any.

    A span on a GPU lies between two events of the thread's current stream: what the stream waited or worked, not the
    thread, which runs ahead. An event is read in a later span, once it has passed: nothing waits for the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._seconds: dict[What, float] = {"wait": 0.0, "busy": 0.0}
        self._count = 0
        self._open: deque[tuple[What, torch.cuda.Event, torch.cuda.Event]] = deque()

    @contextlib.contextmanager
    def span(self, what: What) -> Iterator[None]:
        """Everything that is launched inside, or waited for."""
        if self._device.type == "cuda":
            begun = self._event()
            yield
            self._open.append((what, begun, self._event()))
            self._read()
        else:
            started = time.monotonic()
            yield
            self._add(what, time.monotonic() - started)

    def count(self, done: int) -> None:
        """So many more are done."""
        with self._lock:
            self._count += done

    def take(self) -> Spent:
        """What has been added since the last call."""
        with self._lock:
            spent = Spent(self._seconds["wait"], self._seconds["busy"], self._count)
            self._seconds, self._count = {"wait": 0.0, "busy": 0.0}, 0
            return spent

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _read(self) -> None:
        while self._open and self._open[0][2].query():
            what, begun, ended = self._open.popleft()
            self._add(what, begun.elapsed_time(ended) / 1000)

    def _add(self, what: What, seconds: float) -> None:
        with self._lock:
            self._seconds[what] += seconds


class MeteredStep:
    """A drafter's `step.TrainingStep` whose work and samples its meter counts."""

    def __init__(self, step: TrainingStep, meter: Meter) -> None:
        self._step = step
        self._meter = meter

    @property
    def rate(self) -> Tensor:
        """See `TrainingStep`."""
        return self._step.rate

    @property
    def gradients(self) -> list[Tensor]:
        """See `TrainingStep`."""
        return self._step.gradients

    def accumulate(self, batch: Batch, normaliser: Tensor, *, first: bool, last: bool) -> StepStats:
        """See `TrainingStep`."""
        with self._meter.span("busy"):
            stats = self._step.accumulate(batch, normaliser, first=first, last=last)
        self._meter.count(len(batch.row_ids))
        return stats

    def update(self) -> Tensor:
        """See `TrainingStep`."""
        with self._meter.span("busy"):
            return self._step.update()


class PipelineMeter:
    """Both sides of the queues, over the time between two step records."""

    def __init__(self, drafters: Sequence[torch.device], targets: Sequence[torch.device]) -> None:
        self.drafters = [Meter(device) for device in drafters]
        self.targets = [Meter(device) for device in targets]
        self._since = time.monotonic()

    def start(self) -> None:
        """All workers are built: the first interval begins now."""
        self._since = time.monotonic()

    def record(self) -> dict[str, float]:
        """`pipeline` of a step record (docs/trainer-contract.md), since the call before."""
        now = time.monotonic()
        seconds, self._since = max(now - self._since, 1e-6), now
        drafters, targets = ([meter.take() for meter in side] for side in (self.drafters, self.targets))
        return {
            "seconds": round(seconds, 6),
            "samples_per_s": round(sum(each.count for each in drafters) / seconds, 3),
            "target_tokens_per_s": round(sum(each.count for each in targets) / seconds, 1),
            "drafter_wait": _share([each.wait_s for each in drafters], seconds),
            "drafter_busy": _share([each.busy_s for each in drafters], seconds),
            "target_wait": _share([each.wait_s for each in targets], seconds),
            "target_busy": _share([each.busy_s for each in targets], seconds),
        }


def _share(spent: Sequence[float], seconds: float) -> float:
    # a span that ended just before this interval may be read in it
    return round(min(1.0, sum(spent) / (seconds * len(spent))), 4)
