"""Weights at another address after CUDA graphs were captured over the old one.

Without trees a replay reads the old memory: an AssertionError without text (torch up to 2.13), or, with size asserts
off, steps with the old weights. With trees it records again, each time.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from dflash_ops.release.finding import Severity
from dflash_ops.release.resolve import Module
from dflash_ops.release.rules.base import Hit, Rule, hit_at
from dflash_ops.release.rules.compile_calls import compiled_by, with_graphs
from dflash_ops.release.rules.config_sets import is_literal
from dflash_ops.release.scopes import Function, Scope, own_nodes
from dflash_ops.release.threads import Threads

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_MOVES = {"to", "cuda", "cpu", "half", "float", "bfloat16", "double", "to_empty", "xpu"}
_LISTS = {"parameters", "named_parameters", "buffers", "named_buffers"}
_MAX_DEPTH = 5
_WHY = (
    "gives a module other memory after CUDA graphs were captured over it: a replay reads the old address (no trees:\n"
    "an AssertionError without text up to torch 2.13, old weights in silence with size asserts off)."
)
_FIX = "copy into the memory that is there: load_state_dict without assign, parameter.copy_(value) under no_grad"

_Key = tuple[Scope | ast.ClassDef, str]  # a variable, or an attribute of a class's objects


def find(module: Module, threads: Threads) -> Iterator[Hit]:
    if not threads.spell_graphs:
        return
    captured = _captured(module, threads)
    if not captured:
        return
    for node in module.nodes:
        for moved, at in _moves(module, node):
            key = _key(module, moved)
            if key is not None and any(_later(module, key, compiled, at) for compiled in captured.get(key, [])):
                yield hit_at(at, Severity.ERROR, _WHY, _FIX)


def _captured(module: Module, threads: Threads) -> dict[_Key, list[ast.Call]]:
    """What goes into a compile with graphs, and where."""
    found: dict[_Key, list[ast.Call]] = {}
    for call in module.calls:
        if call.args and with_graphs(compiled_by(threads, module, call)) and not _is_use(threads, module, call):
            for argument in call.args:
                for part in _parts(module, threads, argument, 0):
                    key = _key(module, part)
                    if key is not None:
                        found.setdefault(key, []).append(call)
    for node in module.nodes:
        # another name of the same module
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name) and found:
            for key in filter(None, (_key(module, target) for target in node.targets)):
                found.setdefault(key, []).extend(found.get(_key(module, node.value) or key, []))
    return {key: calls for key, calls in found.items() if calls}


def _is_use(threads: Threads, module: Module, call: ast.Call) -> bool:
    return bool(compiled_by(threads, module, call.func))


def _parts(module: Module, threads: Threads, node: ast.expr, depth: int) -> Iterator[ast.expr]:
    """The variables and attributes that `node` is made of, through local functions."""
    if depth > _MAX_DEPTH:
        return
    for part in ast.walk(node):
        if isinstance(part, (ast.Name, ast.Attribute)) and isinstance(part.ctx, ast.Load):
            yield part
        if isinstance(part, ast.Name):
            shown = module.value(part)
            if shown is not part and isinstance(shown, ast.Call):
                yield from _parts(module, threads, shown, depth + 1)
            for each in module.definitions(part):
                if isinstance(each, _FUNCTIONS):
                    yield from _loads(each)


def _loads(function: Function) -> Iterator[ast.expr]:
    for node in own_nodes(function):
        if isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Load):
            yield node


def _key(module: Module, node: ast.expr) -> _Key | None:
    """Names the variable or the `self.x` that an expression begins with."""
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
            owner = module.class_around(node)
            return (owner, node.attr) if owner is not None else None
        node = node.value
    if not isinstance(node, ast.Name):
        return None
    scope = module.scopes[node].find(node.id)
    return (scope, node.id) if scope is not None else None


def _moves(module: Module, node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """The module that is given other memory, and the place."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        call = node.value
        if isinstance(call.func, ast.Attribute) and call.func.attr in _MOVES:
            yield call.func.value, call
    if isinstance(node, ast.Call):
        loads = isinstance(node.func, ast.Attribute) and node.func.attr == "load_state_dict"
        if isinstance(node.func, ast.Attribute) and loads and _assigns(module, node):
            yield node.func.value, node
        elif module.name(node.func) == "torch.nn.utils.vector_to_parameters":
            yield from ((owner, node) for each in node.args[1:2] for owner in _parameters_of(each))
    if isinstance(node, ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Attribute) and target.attr == "data":
                yield from ((owner, target) for owner in _owners_of(module, target.value))


def _assigns(module: Module, call: ast.Call) -> bool:
    given = module.keywords(call).get("assign", call.args[2] if len(call.args) > 2 else None)
    return is_literal(module, given, True)


def _owners_of(module: Module, node: ast.expr) -> Iterator[ast.expr]:
    """`for p in model.parameters(): p.data = ...` moves `model`, `model.weight.data = ...` too."""
    looped = False
    if isinstance(node, ast.Name):
        for iterable in module.iterables(node):
            looped = True
            for part in ast.walk(iterable):
                if isinstance(part, ast.expr):
                    yield from _parameters_of(part)
    if not looped:
        yield node


def _parameters_of(node: ast.expr) -> Iterator[ast.expr]:
    listed = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _LISTS
    if listed:
        yield node.func.value  # type: ignore[attr-defined]


def _later(module: Module, key: _Key, compiled: ast.Call, moved: ast.expr) -> bool:
    """Whether the move comes after the compile: below it in the same function, or in another method of the class."""
    here, there = next(module.functions_around(compiled), None), next(module.functions_around(moved), None)
    if here is there:
        return moved.lineno > compiled.lineno
    if isinstance(key[0], ast.ClassDef):
        return getattr(there, "name", "") != "__init__"
    # a function that closes over the variable, made after the compile
    return there is not None and there.lineno > compiled.lineno


RULE = Rule("weights-moved-after-capture", find)
