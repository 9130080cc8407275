"""What a training step is made of: any module, a loss, an optimiser. Nothing here knows what is trained."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

Argument = Tensor | tuple[Tensor | int | bool, ...]
Loss = Callable[..., tuple[Tensor, Tensor]]
"""Takes `Prepared.arguments`; gives a scalar to differentiate, and what the caller wants to see of the step."""


@dataclass(frozen=True)
class Prepared:
    """What the loss takes: tensors, and tuples of tensors and of numbers that never change."""

    arguments: tuple[Argument, ...]

    def tensors(self) -> list[Tensor]:
        """Every tensor of it, in a fixed order."""
        found: list[Tensor] = []
        for value in self.arguments:
            parts = value if isinstance(value, tuple) else (value,)
            found.extend(part for part in parts if isinstance(part, Tensor))
        return found


class Optimizer(Protocol):
    """Updates a module's parameters. Everything that changes from step to step is a tensor, a number is frozen."""

    @property
    def rate(self) -> Tensor:
        """The learning rate: 0-dim float32 on the parameters' device, always the same tensor."""
        ...

    def step(self, gradients: Sequence[Tensor]) -> Tensor:
        """Clip and update; the gradient norm before clipping, 0-dim. Reads `gradients`, never writes them.

        Runs inside a CUDA graph: no value may come to the host, no tensor that lives on may be made here.
        """
        ...

    def tensors(self) -> list[Tensor]:
        """What the next step depends on besides parameters and rate; warm-up puts it back."""
        ...


@dataclass(frozen=True)
class StepDefinition:
    """A training step of one replica.

    `module`'s parameters that require gradients are trained, in the module's order. `loss` is a plain Python function
    and is compiled; `prepare` turns the step's inputs into the loss's arguments, uncompiled and without gradient.
    `constants` are tensors that the loss reads besides, and that never move (frozen weights).
    """

    module: nn.Module
    loss: Loss
    optimizer: Optimizer
    prepare: Callable[..., Prepared]
    constants: tuple[Tensor, ...] = ()

    @property
    def parameters(self) -> list[nn.Parameter]:
        """What is trained."""
        return [each for each in self.module.parameters() if each.requires_grad]


class CompiledStep(Protocol):
    """A replica's step as its own thread calls it: `accumulate` for each micro-batch, then `update`.

    Set `rate` before the first micro-batch: the update may run inside the last `accumulate`.
    """

    @property
    def rate(self) -> Tensor:
        """The learning rate: 0-dim float32, always the same tensor."""
        ...

    @property
    def gradients(self) -> list[Tensor]:
        """Of `StepDefinition.parameters`, always the same tensors; nothing but `accumulate` writes them."""
        ...

    def accumulate(self, *inputs: Tensor, first: bool, last: bool) -> Tensor:
        """Forward and backward of one micro-batch; `first` starts from zero gradients. The loss's second value."""
        ...

    def update(self) -> Tensor:
        """After the gradients were exchanged: the gradient norm before clipping, 0-dim."""
        ...


class WarmedStep(CompiledStep, Protocol):
    """A `CompiledStep` that is still to be warmed up."""

    def warm_up(self) -> None:
        """Compile and capture everything. Changes parameters, buffers and the optimiser."""
        ...
