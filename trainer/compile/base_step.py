"""What all steps share."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from trainer.compile.buckets import Buckets
from trainer.compile.gradients import Gradients
from trainer.compile.pinned import Pinned
from trainer.compile.plan import StepPlan
from trainer.compile.private import private_function
from trainer.compile.strategy import Strategy


class BaseStep:
    """Gradients, buckets, and the loss as the strategy compiles it: a code object of its own for each bucket.

    So neither another replica nor another bucket shares Dynamo's cache of it.
    """

    def __init__(self, plan: StepPlan, strategy: Strategy) -> None:
        self._plan = plan
        self._strategy = strategy
        self._definition = plan.definition
        self._gradients = Gradients(plan.definition.parameters, together=plan.replicas > 1)
        self._buckets = Buckets(plan.name, plan.examples)
        self._pinned = Pinned(plan.definition.module, plan.name)
        self._losses = [
            strategy.compile(private_function(plan.definition.loss, f"{plan.name}_bucket_{index}"))
            for index in range(len(plan.examples))
        ]

    @property
    def rate(self) -> Tensor:
        """See `CompiledStep`."""
        return self._definition.optimizer.rate

    @property
    def gradients(self) -> list[Tensor]:
        """See `CompiledStep`."""
        return self._gradients.tensors

    def _bucket(self, inputs: Sequence[Tensor]) -> int:
        """Which example `inputs` are like. Raises `UnknownInputsError` and `MovedError`."""
        self._pinned.check()
        return self._buckets.find(inputs)
