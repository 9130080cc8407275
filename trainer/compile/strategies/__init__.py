"""How a worker's step is compiled: one file each, and this table. A new one is a new file and a line here."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trainer.compile.strategies import default, eager, reduce_overhead, reduce_overhead_trees, whole_step
from trainer.compile.strategy import Strategy

STRATEGIES: dict[str, Strategy] = {
    each.name: each
    for each in (
        eager.STRATEGY,
        default.STRATEGY,
        reduce_overhead.STRATEGY,
        reduce_overhead_trees.STRATEGY,
        whole_step.STRATEGY,
    )
}


def available_strategies(devices: Sequence[torch.device]) -> dict[str, str | None]:
    """By name: None where it can run with one thread on each of `devices`, else why not, in one line."""
    return {name: strategy.refusal(devices) for name, strategy in STRATEGIES.items()}


__all__ = ["STRATEGIES", "available_strategies"]
