"""Parameters and buffers must stay the tensors that the step was built over.

A graph goes on reading and updating the old memory, in silence; and gradients are taken of the old parameters.
"""

from __future__ import annotations

from torch import Tensor, nn


class MovedError(RuntimeError):
    """A parameter or buffer is not where it was when the step was built."""


class Pinned:
    """Remembers where a module's parameters and buffers lie."""

    def __init__(self, module: nn.Module, name: str) -> None:
        self._name = name
        self._places: list[tuple[dict[str, Tensor | None], str, Tensor, int, str]] = []
        for path, part in module.named_modules():
            for holder in (part._parameters, part._buffers):
                for key, tensor in holder.items():
                    if tensor is not None:
                        label = f"{path}.{key}" if path else key
                        self._places.append((holder, key, tensor, tensor.data_ptr(), label))

    def check(self) -> None:
        """Raises `MovedError`."""
        for holder, key, tensor, address, label in self._places:
            if holder.get(key) is not tensor or tensor.data_ptr() != address:
                raise MovedError(
                    f"{self._name}: {label} is not where it was when the step was built; copy into the tensor that is "
                    "there (load_state_dict without assign, copy_ under no_grad), or build the step again"
                )
