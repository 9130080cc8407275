"""Inductor's kernels without CUDA graphs."""

from __future__ import annotations

import torch

from trainer.compile.strategies.base import Step, Strategy


def _compile(function: Step) -> Step:
    compiled: Step = torch.compile(function, fullgraph=True, dynamic=False)
    return compiled


STRATEGY = Strategy("default", _compile, compiles=True, graphs=False, warm_up_calls=2)
