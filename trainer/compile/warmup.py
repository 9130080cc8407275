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
    """Put parameters, buffers, the optimiser and the random states (CPU and the module's devices) back, bit for bit."""
    optimizer = definition.optimizer
    written: list[Tensor] = [*definition.parameters, *definition.module.buffers(), optimizer.rate, *optimizer.tensors()]
    kept = [_kept(each.detach()) for each in written]
    # after a failure nothing is put back: a device whose capture failed is not to be touched again
    with generators_put_back({each.device for each in written}):
        yield
    with torch.no_grad():
        for tensor, before in zip(written, kept, strict=True):
            if before is None:
                tensor.zero_()
            else:
                tensor.copy_(before)


def _kept(tensor: Tensor) -> Tensor | None:
    """A copy in host memory (on a device there may be no room for a second set); None of zeros.

    As small as it can be, since to and fro are seconds of a large drafter's start: a new optimiser's moments are zeros,
    and its master weights are the parameters, which were bfloat16.
    """
    if not tensor.flatten().view(torch.uint8).any():
        return None
    if tensor.dtype == torch.float32:
        narrow = tensor.to(torch.bfloat16)
        if torch.equal(narrow.to(torch.float32), tensor):
            tensor = narrow
    return tensor.to("cpu", copy=True)
