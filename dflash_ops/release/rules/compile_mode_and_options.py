"""`torch.compile(mode=..., options=...)`: torch takes one of the two and raises RuntimeError for both."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from dflash_ops.release.finding import Severity
from dflash_ops.release.resolve import Module, is_none
from dflash_ops.release.rules.base import Hit, Rule, hit_at
from dflash_ops.release.threads import Threads

_FIX = (
    "drop mode and put it into the options: "
    'options={**torch._inductor.list_mode_options("reduce-overhead"), "triton.cudagraph_trees": False}'
)
_MAX_DEPTH = 5  # partial of partial


def find(module: Module, _threads: Threads) -> Iterator[Hit]:
    for call in module.calls:
        compiled = _inner(module, call)
        before = None if compiled is None else _bound(module, compiled)
        if before is None:
            continue
        here = module.keywords(call)
        given = {**before, **here}
        if not ("mode" in given and "options" in given and here.keys() & {"mode", "options"}):
            continue
        mode, options = module.value(given["mode"]), module.value(given["options"])
        if is_none(mode) or is_none(options):
            continue
        if _is_value(mode) or _is_value(options):
            why = "torch.compile gets mode and options; it takes one of them and raises RuntimeError for both."
            yield hit_at(call, Severity.ERROR, why, _FIX)
        else:
            why = "torch.compile gets mode and options from variables; where neither is None it raises RuntimeError."
            yield hit_at(call, Severity.WARNING, why, _FIX)


def _inner(module: Module, call: ast.Call) -> ast.expr | None:
    """What this call calls, now or (functools.partial) later."""
    if module.name(call.func) == "functools.partial":
        return call.args[0] if call.args else None
    return call.func


def _bound(module: Module, node: ast.expr, depth: int = 0) -> dict[str, ast.expr] | None:
    """The keywords that `node` already carries as a partial of torch.compile; None: it is none."""
    if module.name(node) == "torch.compile":
        return {}
    made = module.value(node)
    if depth > _MAX_DEPTH or not isinstance(made, ast.Call) or not made.args:
        return None
    if module.name(made.func) != "functools.partial":
        return None
    inner = _bound(module, made.args[0], depth + 1)
    return None if inner is None else {**inner, **module.keywords(made)}


def _is_value(node: ast.expr) -> bool:
    """Whether the file shows that this is not None."""
    return isinstance(node, (ast.Constant, ast.JoinedStr, ast.Dict, ast.DictComp))


RULE = Rule("compile-mode-and-options", find)
