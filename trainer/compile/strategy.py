"""What a strategy is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from trainer.compile.definition import WarmedStep
from trainer.compile.plan import StepPlan

Step = Callable[..., Any]


def runs_anywhere(_devices: Sequence[torch.device]) -> str | None:
    """For a strategy that asks nothing of the machine."""
    return None


@dataclass(frozen=True)
class Strategy:
    """How a step is compiled.

    `compile` turns a worker's private function into what is called each step, in the worker's own thread. `build` makes
    the step of one replica. `compiles`: torch.compile is used at all. `graphs`: CUDA graphs are replayed on a CUDA
    device. `warm_up_calls`: for each shape, until nothing is compiled or captured any more. `refusal` says in one line
    why it cannot run with one thread on each of these devices (a device may be named twice), or None.
    """

    name: str
    compile: Callable[[Step], Step]
    build: Callable[[StepPlan, Strategy], WarmedStep]
    compiles: bool
    graphs: bool
    warm_up_calls: int
    replays: Callable[[int, int], int]
    replays_per_call: int = 0
    refusal: Callable[[Sequence[torch.device]], str | None] = runs_anywhere

    def uses_graphs(self, device: torch.device) -> bool:
        """Whether CUDA graphs are replayed on `device`."""
        return self.graphs and device.type == "cuda"

    def replays_per_step(self, accumulation: int, replicas: int) -> int:
        """Exactly how many CUDA graph replays one step of one of `replicas` replicas takes on a CUDA device.

        A call of a function that went through `compile`, without gradients, takes `replays_per_call`.
        """
        return self.replays(accumulation, replicas)
