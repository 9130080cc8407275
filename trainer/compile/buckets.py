"""The static shapes that a step was built for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_Signature = tuple[tuple[torch.Size, torch.dtype, torch.device], ...]


class UnknownInputsError(ValueError):
    """Inputs whose shape, dtype or device no example had: nothing is compiled for them, and nothing will be."""


class Buckets:
    """Finds which of the examples some inputs are like."""

    def __init__(self, name: str, examples: Sequence[Sequence[Tensor]]) -> None:
        self._name = name
        self._known = {_signature(each): index for index, each in enumerate(examples)}
        if len(self._known) < len(examples):
            raise ValueError(f"{name}: two of the {len(examples)} examples have the same shapes, dtypes and devices")

    def find(self, inputs: Sequence[Tensor]) -> int:
        """The example's index. Raises `UnknownInputsError`."""
        wanted = _signature(inputs)
        index = self._known.get(wanted)
        if index is None:
            raise UnknownInputsError(self._why(wanted))
        return index

    def _why(self, wanted: _Signature) -> str:
        """What is nearest, and where it differs first."""
        near = min(self._known, key=lambda known: _differences(wanted, known))
        if len(wanted) != len(near):
            return f"{self._name} takes {len(near)} inputs, {len(wanted)} were given"
        index = next(index for index, (one, other) in enumerate(zip(wanted, near, strict=True)) if one != other)
        return (
            f"{self._name} was not built for these inputs: number {index} is {_text(wanted[index])}; the nearest of "
            f"{len(self._known)} examples has {_text(near[index])}. Pad to a bucket, or build the step with one more"
        )


def _signature(inputs: Sequence[Tensor]) -> _Signature:
    return tuple((each.shape, each.dtype, each.device) for each in inputs)


def _differences(one: _Signature, other: _Signature) -> int:
    return sum(a != b for a, b in zip(one, other, strict=False)) + abs(len(one) - len(other))


def _text(part: tuple[torch.Size, torch.dtype, torch.device]) -> str:
    shape, dtype, device = part
    return f"{str(dtype).removeprefix('torch.')} {list(shape)} on {device}"
