"""An output of replayed CUDA graphs that is kept over the next call: it is the same memory each time.

Measured on torch 2.11 without trees: the kept tensor holds the last step's numbers, and nothing says so. With trees
reading it raises ("accessing tensor output of CUDAGraphs that has been overwritten").
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from dflash_ops.release.finding import Severity
from dflash_ops.release.resolve import Module
from dflash_ops.release.rules.base import Hit, Rule, hit_at
from dflash_ops.release.rules.compile_calls import compiled_by, with_graphs
from dflash_ops.release.scopes import Element, Function, own_nodes
from dflash_ops.release.threads import Threads

_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_WITHS = (ast.With, ast.AsyncWith)
_METHODS = (ast.FunctionDef, ast.AsyncFunctionDef)
_Loop = ast.For | ast.AsyncFor | ast.While | ast.FunctionDef | ast.AsyncFunctionDef
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp)
_ADDERS = {"append", "extend", "insert", "add", "appendleft", "put", "put_nowait"}
_CONTAINERS = (ast.List, ast.Dict, ast.ListComp, ast.DictComp)
_MADE = {"builtins.list", "builtins.dict", "collections.deque", "collections.defaultdict", "collections.OrderedDict"}
# methods that give the same memory again
_VIEWS = {
    "detach", "view", "squeeze", "unsqueeze", "flatten", "transpose", "permute", "expand", "narrow", "requires_grad_",
    "contiguous", "reshape", "view_as", "select", "chunk", "split", "unbind", "t", "values", "items",
}  # fmt: skip
_MAX_DEPTH = 20
_WHY = (
    "keeps an output of a CUDA graph over the next call: every call writes into the same memory, so all that is kept\n"
    "becomes the last step's (torch 2.11, no trees: in silence; with trees reading it raises)."
)
_FIX = "keep a copy: .detach().clone(), or a number: .item(); backward of each forward before the next forward"


def find(module: Module, threads: Threads) -> Iterator[Hit]:
    if not threads.spell_graphs:
        return
    kept = _Kept(module, threads, {})
    for loop in module.nodes:
        if isinstance(loop, _COMPREHENSIONS):
            parts = [loop.key, loop.value] if isinstance(loop, ast.DictComp) else [loop.elt]
            if any(kept.fresh(part) for part in parts):
                yield hit_at(loop, Severity.ERROR, _WHY, _FIX)
        elif isinstance(loop, (*_LOOPS, *_METHODS)):
            for node, value in _stores(module, loop):
                if kept.output(value, loop):
                    yield hit_at(node, Severity.ERROR, _WHY, _FIX)


def _stores(module: Module, loop: _Loop) -> Iterator[tuple[ast.expr, ast.expr]]:
    """What the loop or function itself (not one inside it) puts into containers that outlive a turn or a call."""
    for node in _own(loop):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _ADDERS:
            if node.args and not _made_in(module, node.func.value, loop):
                yield node, node.args[-1]
        elif isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add):
            if isinstance(node.value, (ast.List, ast.Tuple)) and not _made_in(module, node.target, loop):
                yield node.target, node.value
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                if (
                    isinstance(target, ast.Subscript)
                    and not isinstance(target.slice, (ast.Constant, ast.Slice))
                    and _is_container(module, target.value)
                    and not _made_in(module, target.value, loop)
                ):
                    yield target, node.value


def _own(loop: _Loop) -> Iterator[ast.AST]:
    waiting: list[ast.AST] = list(loop.body)
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, (*_LOOPS, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            waiting.extend(ast.iter_child_nodes(node))


def _made_in(module: Module, node: ast.expr, loop: _Loop) -> bool:
    """Whether the container is a new one in every turn of the loop, or in every call of the function."""
    if isinstance(node, ast.Attribute):
        return any(isinstance(each, (ast.Assign, ast.AnnAssign)) and _assigns(each, node) for each in ast.walk(loop))
    if not isinstance(node, ast.Name):
        return isinstance(loop, _METHODS)
    bindings = [each for each in module.scopes[node].lookup(node.id) if isinstance(each, ast.expr)]
    if not bindings:  # a parameter: the caller's
        return isinstance(loop, _METHODS)
    return all(_within(each, loop) for each in bindings)


def _assigns(node: ast.Assign | ast.AnnAssign, attribute: ast.Attribute) -> bool:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return any(ast.unparse(each) == ast.unparse(attribute) for each in targets)


def _is_container(module: Module, node: ast.expr) -> bool:
    """A list or a dict, where an item keeps the tensor; an item of a tensor is a copy."""
    made = module.value(node)
    if isinstance(made, ast.BinOp):  # [None] * steps
        made = made.left
    return isinstance(made, _CONTAINERS) or (isinstance(made, ast.Call) and module.name(made.func) in _MADE)


def _within(node: ast.expr, around: ast.stmt) -> bool:
    return around.lineno <= node.lineno <= (around.end_lineno or around.lineno)


class _Kept:
    def __init__(self, module: Module, threads: Threads, returned: dict[Function, bool]) -> None:
        """`returned`: what is known of functions, shared by all that look."""
        self._returns = returned
        self._module = module
        self._threads = threads
        withs = [node for node in module.nodes if isinstance(node, _WITHS)] if "graph" in module.words else []
        self._captures = [node for node in withs if any(_is_capture(module, item.context_expr) for item in node.items)]

    def fresh(self, node: ast.expr) -> bool:
        """Whether `node`, evaluated again and again, calls for a graph's output each time."""
        return self._output(node, None, 0)

    def output(self, node: ast.expr, loop: ast.stmt) -> bool:
        """Whether `node`, in a loop, is the output of a graph that the loop runs."""
        return self._output(node, loop, 0)

    def _output(self, node: ast.expr, loop: ast.stmt | None, depth: int) -> bool:
        if depth > _MAX_DEPTH:
            return False
        if isinstance(node, ast.Name):
            return self._bound(node, loop, depth)
        if isinstance(node, ast.Call):
            if with_graphs(compiled_by(self._threads, self._module, node.func)):
                return True
            if isinstance(node.func, ast.Attribute) and node.func.attr in _VIEWS:
                return self._output(node.func.value, loop, depth + 1)
            return any(self._returned(function, depth) for function in self._callees(node))
        if isinstance(node, ast.Attribute):
            return node.attr not in {"shape", "dtype", "device", "grad"} and self._output(node.value, loop, depth + 1)
        if isinstance(node, (ast.Subscript, ast.Starred, ast.NamedExpr)):
            return self._output(node.value, loop, depth + 1)
        if isinstance(node, ast.IfExp):
            return self._output(node.body, loop, depth + 1) or self._output(node.orelse, loop, depth + 1)
        if isinstance(node, (ast.Tuple, ast.List)):
            return any(self._output(each, loop, depth + 1) for each in node.elts)
        if isinstance(node, ast.Dict):
            return any(self._output(each, loop, depth + 1) for each in node.values)
        return False

    def _callees(self, call: ast.Call) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
        found = self._threads.flow.callees(self._module, call)
        return [each for each in found if isinstance(each, _METHODS) and each.name != "__init__"]

    def _returned(self, function: ast.FunctionDef | ast.AsyncFunctionDef, depth: int) -> bool:
        """Whether it gives such an output to its caller."""
        if function not in self._returns:
            self._returns[function] = False  # what a recursion finds
            there = _Kept(self._threads.home(function), self._threads, self._returns)
            self._returns[function] = any(
                isinstance(node, ast.Return) and node.value is not None and there._output(node.value, function, depth)
                for node in own_nodes(function)
            )
        return self._returns[function]

    def _bound(self, node: ast.Name, loop: ast.stmt | None, depth: int) -> bool:
        if loop is None:
            return False
        bindings = self._module.scopes[node].lookup(node.id)
        exprs = [
            each.iterable if isinstance(each, Element) else each
            for each in bindings
            if isinstance(each, (Element, ast.expr))
        ]
        # one more binding, of another kind, may be what is kept
        if len(exprs) != len(bindings):
            return False
        if exprs and all(self._captured(each) for each in exprs):
            return self._replays(loop)
        inside = [each for each in exprs if _within(each, loop)]
        return bool(inside) and all(self._output(each, loop, depth + 1) for each in inside)

    def _captured(self, node: ast.expr) -> bool:
        return any(_within(node, capture) for capture in self._captures)

    def _replays(self, loop: ast.stmt) -> bool:
        return any(
            isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "replay"
            for node in ast.walk(loop)
        )


def _is_capture(module: Module, node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and module.name(node.func) in {"torch.cuda.graph", "torch.cuda.graphs.graph"}


RULE = Rule("output-kept-across-steps", find)
