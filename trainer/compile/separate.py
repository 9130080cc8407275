"""The step in its separate parts: forward and backward are called one after the other, then the update."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trainer.compile.base_step import BaseStep
from trainer.compile.definition import Prepared
from trainer.compile.held_inputs import HeldInputs, keep_address
from trainer.compile.plan import StepPlan
from trainer.compile.strategy import Strategy


class SeparateStep(BaseStep):
    """A `CompiledStep` whose loss is compiled; the optimiser stays as it is.

    For a strategy with graphs the loss's arguments and the constants always lie in the same memory.
    """

    def __init__(self, plan: StepPlan, strategy: Strategy) -> None:
        super().__init__(plan, strategy)
        self._held: list[HeldInputs] = []
        if strategy.graphs:
            for tensor in self._definition.constants:
                keep_address(tensor)
            self._held = [HeldInputs(each, self._definition.prepare) for each in plan.examples]
            for each in self._held:
                each.keep_arguments()

    def accumulate(self, *inputs: Tensor, first: bool, last: bool) -> Tensor:
        """See `CompiledStep`."""
        bucket = self._bucket(inputs)
        loss, seen = self._losses[bucket](*self._prepared(bucket, inputs).arguments)
        self._gradients.backward(loss, first=first)
        # a replayed graph writes its outputs into the same memory again: keep a copy
        return seen.detach().clone()

    def update(self) -> Tensor:
        """See `CompiledStep`."""
        return self._definition.optimizer.step(self.gradients)

    @torch.no_grad()
    def _prepared(self, bucket: int, inputs: Sequence[Tensor]) -> Prepared:
        """The loss's arguments; for graphs, always in the same memory."""
        if not self._held:
            return self._definition.prepare(*inputs)
        held = self._held[bucket]
        held.load(inputs)
        return held.arguments()

    def warm_up(self) -> None:
        """Run every bucket until nothing is left to compile or capture. Changes parameters and optimiser."""
        for example in self._plan.examples:
            for call in range(self._strategy.warm_up_calls):
                self.accumulate(*example, first=call == 0, last=False)
        self.update()
        self._gradients.zero()
