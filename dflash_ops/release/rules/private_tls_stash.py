"""Filling the thread-local state of CUDAGraph Trees by hand.

Measured on torch 2.11: with `local` filled the backward asserts in autograd's thread, and with the C-level stash
`beginAllocateToPool` finds another recording; neither brings the lock around capture that torch 2.13 has.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from dflash_ops.release.finding import Severity
from dflash_ops.release.resolve import Module, text
from dflash_ops.release.rules.base import Hit, Rule, hit_at
from dflash_ops.release.threads import Threads

_CALLS = {f"torch._C.{name}" for name in ("_stash_obj_in_tls", "_is_key_in_tls", "_get_obj_in_tls")}
_LOCAL = "torch._inductor.cudagraph_trees.local"
_WHY_CALL = (
    "torch's private thread-local stash: it gives a worker CUDAGraph Trees without their lock, and captures collide."
)
_WHY_LOCAL = (
    "fills CUDAGraph Trees' thread-local state by hand: autograd's threads lack it, and nothing serialises capture."
)
_FIX = (
    "leave the trees off in threads, per compile: "
    'options={**torch._inductor.list_mode_options("reduce-overhead"), "triton.cudagraph_trees": False}'
)


def find(module: Module, _threads: Threads) -> Iterator[Hit]:
    for node in module.nodes:
        if not isinstance(node, (ast.Name, ast.Attribute, ast.Subscript, ast.Call)):
            continue
        if _uses_stash(module, node):
            yield hit_at(node, Severity.ERROR, _WHY_CALL, _FIX)
        elif _changes_local(module, node):
            yield hit_at(node, Severity.ERROR, _WHY_LOCAL, _FIX)


def _uses_stash(module: Module, node: ast.expr) -> bool:
    if isinstance(node, ast.Name) and not module.imported(node):
        return False  # an alias was reported where it was made
    stored = isinstance(node, (ast.Name, ast.Attribute)) and not isinstance(node.ctx, ast.Load)
    return not stored and module.name(node) in _CALLS


def _changes_local(module: Module, node: ast.expr) -> bool:
    if isinstance(node, ast.Call):
        function = module.name(node.func) or ""
        if function in {"builtins.setattr", "builtins.delattr"} and len(node.args) >= 2:
            owner, attribute = module.name(node.args[0]), text(node.args[1])
            return _LOCAL in {owner, f"{owner}.{attribute}"}
        return function in {f"{_LOCAL}.__dict__.{method}" for method in ("update", "setdefault")}
    if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
        return _LOCAL in {module.name(node), module.name(node.value)}
    if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
        return (module.name(node.value) or "").startswith(f"{_LOCAL}.")
    return False


RULE = Rule("private-tls-stash", find)
