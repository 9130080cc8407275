"""What a step is built from."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from trainer.compile.definition import StepDefinition


@dataclass(frozen=True)
class StepPlan:
    """One replica's step: what it computes, for inputs like one of `examples`, with so many micro-batches a step.

    `replicas`: how many exchange their gradients; with 1 nothing happens between the last backward and the update.
    `name` (a Python identifier) differs between the process's steps.
    """

    definition: StepDefinition
    examples: tuple[tuple[Tensor, ...], ...]
    accumulation: int
    replicas: int
    name: str
