"""Warm-up takes steps for real; afterwards nothing may remember it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from trainer.compile.definition import StepDefinition


@contextlib.contextmanager
def untouched(definition: StepDefinition) -> Iterator[None]:
    """Put parameters, buffers, the optimiser and the random states (CPU and the module's devices) back as they were.

    The copies wait in host memory: on a device there may be no room for a second set.
    """
    optimizer = definition.optimizer
    written: list[Tensor] = [*definition.parameters, *definition.module.buffers(), optimizer.rate, *optimizer.tensors()]
    kept = [each.detach().to("cpu", copy=True) for each in written]
    devices = sorted({each.device.index for each in written if each.device.type == "cuda"})
    random, on_devices = torch.get_rng_state(), [torch.cuda.get_rng_state(device) for device in devices]
    # after a failure nothing is put back: a device whose capture failed is not to be touched again
    yield
    torch.set_rng_state(random)
    for device, state in zip(devices, on_devices, strict=True):
        torch.cuda.set_rng_state(state, device)
    with torch.no_grad():
        for tensor, before in zip(written, kept, strict=True):
            tensor.copy_(before)
