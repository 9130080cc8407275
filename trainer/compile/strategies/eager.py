"""Not compiled: the reference that the others are measured against."""

from __future__ import annotations

from trainer.compile.separate import SeparateStep
from trainer.compile.strategy import Step, Strategy


def _as_it_is(function: Step) -> Step:
    return function


STRATEGY = Strategy(
    "eager",
    _as_it_is,
    SeparateStep,
    compiles=False,
    graphs=False,
    warm_up_calls=1,
    replays=lambda _accumulation, _replicas: 0,
)
