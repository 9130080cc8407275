"""The step in its separate parts: forward and backward are called one after the other, then the update."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trainer.compile.definition import Loss, Prepared, StepDefinition
from trainer.compile.gradients import Gradients
from trainer.compile.held_inputs import HeldInputs, keep_address
from trainer.compile.private import private_function
from trainer.compile.strategies.base import Strategy

Bucket = tuple[torch.Size, ...]


class SeparateStep:
    """A `CompiledStep` whose loss is compiled by the strategy; the optimiser stays as it is.

    Each bucket (the shapes of the inputs) gets a code object of its own, so that neither another replica nor another
    bucket shares Dynamo's cache of this one. `name` must differ between the process's steps.
    """

    def __init__(self, definition: StepDefinition, strategy: Strategy, name: str) -> None:
        self._definition = definition
        self._strategy = strategy
        self._name = name
        self._gradients = Gradients(definition.parameters)
        self._compiled: dict[Bucket, Loss] = {}
        self._held: dict[Bucket, HeldInputs] = {}
        if strategy.graphs:
            for tensor in definition.constants:
                keep_address(tensor)

    @property
    def rate(self) -> Tensor:
        """See `CompiledStep`."""
        return self._definition.optimizer.rate

    @property
    def gradients(self) -> list[Tensor]:
        """See `CompiledStep`."""
        return self._gradients.tensors

    def accumulate(self, *inputs: Tensor, first: bool, last: bool) -> Tensor:
        """See `CompiledStep`."""
        bucket = tuple(each.shape for each in inputs)
        loss, seen = self._loss(bucket)(*self._prepared(bucket, inputs).arguments)
        self._gradients.backward(loss, first=first)
        # a replayed graph writes its outputs into the same memory again: keep a copy
        return seen.detach().clone()

    def update(self) -> Tensor:
        """See `CompiledStep`."""
        return self._definition.optimizer.step(self.gradients)

    def _loss(self, bucket: Bucket) -> Loss:
        known = self._compiled.get(bucket)
        if known is None:
            own = private_function(self._definition.loss, f"{self._name}_bucket_{len(self._compiled)}")
            known = self._compiled[bucket] = self._strategy.compile(own)
        return known

    def _prepared(self, bucket: Bucket, inputs: Sequence[Tensor]) -> Prepared:
        """The loss's arguments; for graphs, always in the same memory."""
        with torch.no_grad():
            if not self._strategy.graphs:
                return self._definition.prepare(*inputs)
            held = self._held.get(bucket)
            if held is None:
                held = self._held[bucket] = HeldInputs(inputs, self._definition.prepare)
            return held.load(inputs)

    def warm_up(self, examples: Sequence[Sequence[Tensor]]) -> None:
        """Run every bucket until nothing is left to compile or capture. Changes parameters and optimiser."""
        for example in examples:
            for call in range(self._strategy.warm_up_calls):
                self.accumulate(*example, first=call == 0, last=False)
        self.update()
        self._gradients.zero()
