"""A decoder whose layers lie on several GPUs, for a target that is too large for one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn


def spread_layers(body: nn.Module, devices: Sequence[torch.device]) -> None:
    """Move a decoder stack (`layers`, `embed_tokens`, `norm`) to `devices`, about the same bytes to each, in order.

    Embedding and final norm lie on the first, so that tokens go in and the last hidden states come out there. A layer's
    inputs are brought to where it lies; copies between GPUs are on the calling thread's streams of both.
    """
    layers = list(body.get_submodule("layers").children())
    places = balanced([_size(each) for each in layers], _size(body) - sum(map(_size, layers)), len(devices))
    for name, child in body.named_children():
        if name != "layers":
            child.to(devices[0])
    for layer, place in zip(layers, places, strict=True):
        layer.to(devices[place])
        layer.register_forward_pre_hook(_bring(devices[place]), with_kwargs=True)
    body.get_submodule("norm").register_forward_pre_hook(_bring(devices[0]), with_kwargs=True)


def balanced(sizes: Sequence[int], first: int, parts: int) -> list[int]:
    """The part of each of `sizes`, ascending: sums as even as whole ones allow, where part 0 has `first` already."""
    share = (first + sum(sizes)) / parts
    found, done = [], first
    for size in sizes:
        # by its middle: whole layers fall to the part that has most of them
        found.append(min(parts - 1, int((done + size / 2) / share)))
        done += size
    return found


def _size(module: nn.Module) -> int:
    return sum(each.nbytes for each in module.parameters())


def _bring(device: torch.device) -> Callable[[nn.Module, Any, dict[str, Any]], Any]:
    def bring(_module: nn.Module, inputs: Any, named: dict[str, Any]) -> Any:
        return _moved(inputs, device), _moved(named, device)

    return bring


def _moved(value: Any, device: torch.device) -> Any:
    """Tensors in tuples, lists and dictionaries; anything else (a cache, which follows its layer) as it is."""
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if type(value) in (tuple, list):
        return type(value)(_moved(each, device) for each in value)
    if type(value) is dict:
        return {name: _moved(each, device) for name, each in value.items()}
    return value
