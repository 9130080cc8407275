"""Which strategy a workload's drafters are compiled with."""

from __future__ import annotations

from trainer.compile import STRATEGIES, Strategy, available_strategies
from trainer.errors import InputError
from trainer.placement import Placement
from trainer.settings import Workload


def strategy_of(workload: Workload, placement: Placement) -> Strategy:
    """The strategy that the workload names (not auto). Raises `InputError` where it cannot run on `placement`."""
    strategy = STRATEGIES[workload.strategy]
    why = strategy.refusal(placement.drafters)
    if why is not None:
        others = [name for name, refused in available_strategies(placement.drafters).items() if refused is None]
        raise InputError(
            f"strategy {strategy.name} cannot run here: {why}",
            "workload.strategy",
            f"take one of {', '.join(others)}",
        )
    return strategy
