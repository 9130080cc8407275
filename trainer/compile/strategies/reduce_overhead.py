"""Inductor's kernels inside CUDA graphs, without CUDA graph trees.

Trees keep their state where user threads do not have it (up to torch 2.12), and since 2.12 a configuration value set
in the main thread is not seen in a worker: the options are therefore spelled for each compile (`mode` and `options`
exclude each other). On a CPU the same options compile without graphs.
"""

from __future__ import annotations

import torch
from torch import _inductor as inductor

from trainer.compile.separate import SeparateStep
from trainer.compile.strategy import Step, Strategy


def _compile(function: Step) -> Step:
    options = {**inductor.list_mode_options("reduce-overhead"), "triton.cudagraph_trees": False}
    compiled: Step = torch.compile(function, fullgraph=True, dynamic=False, options=options)
    return compiled


STRATEGY = Strategy(
    "reduce-overhead",
    _compile,
    SeparateStep,
    compiles=True,
    graphs=True,
    warm_up_calls=3,
    # forward and backward of each micro-batch
    replays=lambda accumulation, _replicas: 2 * accumulation,
    replays_per_call=1,
)
