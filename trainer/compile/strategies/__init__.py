"""How a worker's step is compiled: one file each, and this table. A new one is a new file and a line here."""

from __future__ import annotations

from trainer.compile.strategies import default, eager, reduce_overhead
from trainer.compile.strategies.base import Strategy

STRATEGIES: dict[str, Strategy] = {
    each.name: each for each in (eager.STRATEGY, default.STRATEGY, reduce_overhead.STRATEGY)
}

__all__ = ["STRATEGIES", "Strategy"]
