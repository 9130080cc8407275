"""How long steady steps take: by events on each worker's stream, without making any of them wait."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from itertools import pairwise

import torch

_AHEAD = 2
"""Steps that a host thread may run ahead of its GPU: so that it does not queue up a whole measurement in no time."""


class StepClock:
    """`tick` is called after each step, in the worker's thread and on its stream."""

    def __init__(self, workers: int) -> None:
        self._events: list[list[torch.cuda.Event]] = [[] for _ in range(workers)]
        self._moments: list[list[float]] = [[] for _ in range(workers)]

    def tick(self, worker: int, device: torch.device) -> None:
        """A step of `worker` ends here."""
        if device.type != "cuda":
            self._moments[worker].append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(device))
        events = self._events[worker]
        events.append(event)
        if len(events) > _AHEAD:
            events[-1 - _AHEAD].synchronize()

    def step_ms(self) -> list[list[float]]:
        """Milliseconds between the ends of successive steps, by worker; waits for the last one."""
        return [
            _between_events(events) if events else [(after - before) * 1e3 for before, after in pairwise(moments)]
            for events, moments in zip(self._events, self._moments, strict=True)
        ]


def median_step_ms(by_worker: Sequence[Sequence[float]]) -> float:
    """The median step of the slowest worker."""
    return max(statistics.median(steps) for steps in by_worker)


def _between_events(events: Sequence[torch.cuda.Event]) -> list[float]:
    events[-1].synchronize()
    return [float(before.elapsed_time(after)) for before, after in pairwise(events)]
