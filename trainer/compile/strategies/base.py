"""What a strategy is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Step = Callable[..., Any]


@dataclass(frozen=True)
class Strategy:
    """`compile` turns a worker's private function into what is called each step, in the worker's own thread.

    `compiles`: torch.compile is used at all. `graphs`: it replays CUDA graphs on a CUDA device. `warm_up_calls`:
    forward-backwards for each shape until nothing is compiled or captured any more.
    """

    name: str
    compile: Callable[[Step], Step]
    compiles: bool
    graphs: bool
    warm_up_calls: int

    def uses_graphs(self, device: torch.device) -> bool:
        """Whether CUDA graphs are replayed on `device`."""
        return self.graphs and device.type == "cuda"
