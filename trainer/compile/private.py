"""A code object of its own for each worker.

Dynamo's cache belongs to the code object: a second replica that runs the same function gets the graph that the first
one captured over its own weights (an AssertionError at best; with size asserts off, silently wrong gradients).
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

_P = ParamSpec("_P")
_R = TypeVar("_R")


def private_function(function: Callable[_P, _R], name: str) -> Callable[_P, _R]:
    """The same Python function with a copy of its code object called `name` (a Python identifier)."""
    if not isinstance(function, types.FunctionType):
        raise TypeError(f"{function!r} is not a Python function: only those have a code object")
    code = function.__code__.replace(co_name=name)
    copy = types.FunctionType(code, function.__globals__, name, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return cast("Callable[_P, _R]", copy)
