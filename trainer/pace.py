"""How far a worker's thread may run ahead of its GPU."""

from __future__ import annotations

from collections import deque

import torch

AHEAD = 2
"""Steps: enough to hide the launching of one, and the batches that are in flight stay few."""


class Pace:
    """One thread's, for what it launches on its current stream of `device`. On a CPU nothing runs ahead."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: deque[torch.cuda.Event] = deque()

    def wait(self) -> None:
        """Until at most `AHEAD` marks have not passed yet."""
        while len(self._marks) > AHEAD:
            self._marks.popleft().synchronize()

    def mark(self) -> None:
        """A step ends here."""
        if self._device.type != "cuda":
            return
        # blocking: a thread that spins would take a core from the others
        event = torch.cuda.Event(blocking=True)
        event.record(torch.cuda.current_stream(self._device))
        self._marks.append(event)
