"""Not compiled: the reference that the others are measured against."""

from __future__ import annotations

from trainer.compile.strategies.base import Step, Strategy


def _as_it_is(function: Step) -> Step:
    return function


STRATEGY = Strategy("eager", _as_it_is, compiles=False, graphs=False, warm_up_calls=1)
