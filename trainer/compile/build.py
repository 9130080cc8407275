"""Builds a step and warms it up."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trainer.compile.definition import CompiledStep, StepDefinition
from trainer.compile.separate import SeparateStep
from trainer.compile.strategies.base import Strategy
from trainer.compile.warmup import untouched


def compiled_step(
    definition: StepDefinition, strategy: Strategy, examples: Sequence[Sequence[Tensor]], *, name: str
) -> CompiledStep:
    """The step of one replica, for inputs shaped like one of `examples`; call it in the thread that will use it.

    Inside the process-wide gate (`Gate.exclusive`), with the thread's own device and stream current: all compiling and
    capturing happens here. Module, optimiser and random states are afterwards bitwise what they were. `name` (a Python
    identifier) must differ between the process's steps.
    """
    step = SeparateStep(definition, strategy, name)
    with untouched(definition):
        step.warm_up(examples)
    if step.rate.device.type == "cuda":
        torch.cuda.current_stream(step.rate.device).synchronize()
    return step
