"""Everything of a step in CUDA graphs of our own; inside them Inductor's kernels, without graphs of its own."""

from __future__ import annotations

from trainer.compile.strategies.default import compile_plainly
from trainer.compile.strategy import Strategy
from trainer.compile.whole_step import WholeStep


def _replays(accumulation: int, replicas: int) -> int:
    return accumulation if replicas == 1 else accumulation + 1


STRATEGY = Strategy(
    "whole-step", compile_plainly, WholeStep, compiles=True, graphs=True, warm_up_calls=2, replays=_replays
)
