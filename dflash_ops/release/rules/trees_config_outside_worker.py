"""`torch._inductor.config.triton.cudagraph_trees` set where worker threads do not see it.

From torch 2.12 on, inductor's configuration is a ContextVar and a new thread starts with an empty context
(pytorch PR #173568, issue #186537): the worker compiles with the default, trees on.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from dflash_ops.release.finding import Severity
from dflash_ops.release.resolve import Module, text
from dflash_ops.release.rules.base import Hit, Rule, hit_at
from dflash_ops.release.workers import worker_functions

_CONFIG = "torch._inductor.config"
_KEY = "triton.cudagraph_trees"
_WHY = (
    "sets triton.cudagraph_trees in a thread that is no worker: from torch 2.12 on the value holds for the thread\n"
    "that sets it only, so worker threads compile with the default (trees on)."
)
_FIX = (
    "pass it per compile: "
    'options={**torch._inductor.list_mode_options("reduce-overhead"), "triton.cudagraph_trees": False}'
)


def find(module: Module) -> Iterator[Hit]:
    places = [node for node in module.nodes() if isinstance(node, ast.expr) and _sets_trees(module, node)]
    if not places:
        return
    workers = worker_functions(module)
    decorated = {
        decorator: node
        for node in module.nodes()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        for decorator in node.decorator_list
    }
    for node in places:
        # a patch as a decorator takes effect in the thread that calls the function
        around = {*module.functions_around(node), decorated.get(node)}
        if not around & workers:
            yield hit_at(node, Severity.ERROR, _WHY, _FIX)


def _sets_trees(module: Module, node: ast.expr) -> bool:
    if isinstance(node, ast.Attribute):
        return not isinstance(node.ctx, ast.Load) and module.name(node) == f"{_CONFIG}.{_KEY}"
    if not isinstance(node, ast.Call):
        return False
    function = module.name(node.func)
    if function == "builtins.setattr" and len(node.args) >= 2:
        return f"{module.name(node.args[0])}.{text(node.args[1])}" == f"{_CONFIG}.{_KEY}"
    if function not in {f"{_CONFIG}.patch", f"{_CONFIG}.load_config"}:
        return False
    given = set(module.keywords(node))
    for argument in node.args[:1]:
        value = module.value(argument)
        given |= {text(value) or "", *module.items(value)}
    return _KEY in given


RULE = Rule("trees-config-outside-worker", find)
