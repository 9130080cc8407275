"""Builds a step and warms it up."""

from __future__ import annotations

import torch

from trainer.compile.definition import CompiledStep
from trainer.compile.failure import capture_error, is_capture_error
from trainer.compile.plan import StepPlan
from trainer.compile.strategy import Strategy
from trainer.compile.warmup import untouched


def compiled_step(plan: StepPlan, strategy: Strategy) -> CompiledStep:
    """The step of one replica; call it in the thread that will use it.

    Inside the process-wide gate (`Gate.exclusive`) and in `own_device`: all compiling and capturing happens here.
    Module, optimiser and random states are afterwards bitwise what they were. Raises `CaptureError`, after which the
    process must end.
    """
    device = plan.definition.optimizer.rate.device
    with untouched(plan.definition):
        step = strategy.build(plan, strategy)
        try:
            step.warm_up()
        except Exception as error:
            if strategy.uses_graphs(device) and is_capture_error(error):
                raise capture_error(plan.name, device, error) from error
            raise
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    return step
