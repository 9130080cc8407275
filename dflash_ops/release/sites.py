"""What a call gives to the function that it calls, or has called."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from dflash_ops.release.resolve import Module


@dataclass(frozen=True)
class Site:
    """One place that calls a function: what it gives."""

    module: Module
    positional: tuple[ast.expr, ...]
    keywords: dict[str, ast.expr]


def handed_over(module: Module, call: ast.Call) -> Iterator[tuple[ast.expr, Site]]:
    """A function that this call gets together with the arguments for it: partials, threads, pools."""
    name = module.name(call.func)
    if (name == "functools.partial" and call.args) or (
        isinstance(call.func, ast.Attribute) and call.func.attr == "submit" and call.args
    ):
        keywords = {each.arg: each.value for each in call.keywords if each.arg}
        yield call.args[0], Site(module, tuple(call.args[1:]), keywords)
    else:
        given = {each.arg: each.value for each in call.keywords if each.arg}
        if "target" in given and ("args" in given or "kwargs" in given):
            positional = module.value(given["args"]) if "args" in given else None
            listed = tuple(positional.elts) if isinstance(positional, (ast.Tuple, ast.List)) else ()
            yield given["target"], Site(module, listed, module.items(given["kwargs"]) if "kwargs" in given else {})
