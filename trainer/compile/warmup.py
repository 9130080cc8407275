"""Warm-up runs a model for real; afterwards nothing may remember it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import nn


@contextlib.contextmanager
def untouched(module: nn.Module, generators: Sequence[torch.Generator] = ()) -> Iterator[None]:
    """Put buffers, gradients, and random states back as they were: the given generators and the default ones.

    Parameters are not copied: forward and backward never write them. Gradients that were None become zeros, since
    compiled code and the exchange want their addresses to stay.
    """
    devices = sorted({each.device.index for each in module.parameters() if each.device.type == "cuda"})
    buffers = [(each, each.detach().clone()) for each in module.buffers()]
    gradients = [None if each.grad is None else each.grad.detach().clone() for each in module.parameters()]
    states = [each.get_state() for each in generators]
    with torch.random.fork_rng(devices=devices):
        yield
    for generator, state in zip(generators, states, strict=True):
        generator.set_state(state)
    with torch.no_grad():
        for buffer, kept in buffers:
            buffer.copy_(kept)
        for parameter, gradient in zip(module.parameters(), gradients, strict=True):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            elif gradient is None:
                parameter.grad.zero_()
            else:
                parameter.grad.copy_(gradient)
