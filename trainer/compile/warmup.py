"""Warm-up takes steps for real; afterwards nothing may remember it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from trainer.compile.definition import StepDefinition
from trainer.compile.generators import generators_put_back


@contextlib.contextmanager
def untouched(definition: StepDefinition) -> Iterator[None]:
    """Put parameters, buffers, the optimiser and the random states (CPU and the module's devices) back as they were.

    The copies wait in host memory: on a device there may be no room for a second set.
    """
    optimizer = definition.optimizer
    written: list[Tensor] = [*definition.parameters, *definition.module.buffers(), optimizer.rate, *optimizer.tensors()]
    kept = [each.detach().to("cpu", copy=True) for each in written]
    # after a failure nothing is put back: a device whose capture failed is not to be touched again
    with generators_put_back({each.device for each in written}):
        yield
    with torch.no_grad():
        for tensor, before in zip(written, kept, strict=True):
            tensor.copy_(before)
