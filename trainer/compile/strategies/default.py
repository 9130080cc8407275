"""Inductor's kernels without CUDA graphs."""

from __future__ import annotations

import torch

from trainer.compile.separate import SeparateStep
from trainer.compile.strategy import Step, Strategy


def compile_plainly(function: Step) -> Step:
    """Compiled for its first inputs' shapes, in one piece."""
    compiled: Step = torch.compile(function, fullgraph=True, dynamic=False)
    return compiled


STRATEGY = Strategy(
    "default",
    compile_plainly,
    SeparateStep,
    compiles=True,
    graphs=False,
    warm_up_calls=2,
    replays=lambda _accumulation, _replicas: 0,
)
