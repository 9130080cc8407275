"""Which lines run while their thread holds a lock of the whole process."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from dflash_ops.release.flow import Flow
from dflash_ops.release.resolve import Module
from dflash_ops.release.scopes import Function

_WORD = re.compile(r"(^|_)(r?lock|gated?|mutex|semaphore|exclusive(ly)?|seriali[sz]ed|serial)(s|_|$)")
_LOCKS = {f"threading.{name}" for name in ("Lock", "RLock", "Semaphore", "BoundedSemaphore", "Condition")}
_INNER = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
_WITH = (ast.With, ast.AsyncWith)
_METHODS = (ast.FunctionDef, ast.AsyncFunctionDef)


class Gates:
    """`with X:`, or what follows `X.acquire()` in the same block, is inside a gate when X is a lock: made by
    threading.Lock and its kin, or named so (lock, gate, mutex, semaphore, exclusive, serialised; a decorator too).

    No gate: a lock that each worker makes for itself, in `workers` or in a field of a class in `thread_classes`.
    """

    def __init__(self, flow: Flow, workers: frozenset[Function], thread_classes: frozenset[ast.ClassDef]) -> None:
        self._flow = flow
        self._workers = workers
        self._thread_classes = thread_classes

    def nodes(self, module: Module, function: Function) -> Iterator[tuple[ast.AST, bool]]:
        """What runs when `function` runs, each with whether it is inside a gate."""
        gated = isinstance(function, _METHODS) and any(
            self._named_gate(each.func if isinstance(each, ast.Call) else each) for each in function.decorator_list
        )
        if isinstance(function, ast.Lambda):
            yield from self._walk(module, function.body, gated)
        else:
            yield from self._block(module, function.body, gated)

    def _block(self, module: Module, statements: list[ast.stmt], gated: bool) -> Iterator[tuple[ast.AST, bool]]:
        held = gated
        for statement in statements:
            if isinstance(statement, ast.Expr) and self._calls(module, statement, "release"):
                held = gated
            yield from self._walk(module, statement, held)
            compound = isinstance(statement, (*_WITH, ast.Try, *_INNER))
            if not compound and (self._calls(module, statement, "acquire") or self._enters(module, statement)):
                held = True

    def _walk(self, module: Module, node: ast.AST, gated: bool) -> Iterator[tuple[ast.AST, bool]]:
        yield node, gated
        if isinstance(node, _INNER):
            return
        inside = gated
        if isinstance(node, _WITH):
            for item in node.items:
                yield from self._walk(module, item, inside)
                inside = inside or self.is_gate(module, item.context_expr)
            yield from self._block(module, node.body, inside)
            return
        for _, value in ast.iter_fields(node):
            if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
                yield from self._block(module, value, gated)
            elif isinstance(value, list):
                for each in value:
                    if isinstance(each, ast.AST):
                        yield from self._walk(module, each, gated)
            elif isinstance(value, ast.AST):
                yield from self._walk(module, value, gated)

    def is_gate(self, module: Module, node: ast.expr) -> bool:
        if isinstance(node, ast.IfExp):
            return self.is_gate(module, node.body) or self.is_gate(module, node.orelse)
        if isinstance(node, ast.Call):
            return self.is_gate(module, node.func)
        if self._own(module, node):
            return False
        return self._named_gate(node) or self._is_lock(module, module.value(node))

    def _named_gate(self, node: ast.expr) -> bool:
        if isinstance(node, ast.Attribute):
            return bool(_WORD.search(node.attr.lower())) or self._named_gate(node.value)
        if isinstance(node, ast.Call):
            return self._named_gate(node.func)
        return isinstance(node, ast.Name) and bool(_WORD.search(node.id.lower()))

    def _is_lock(self, module: Module, node: ast.expr) -> bool:
        return isinstance(node, ast.Call) and module.name(node.func) in _LOCKS

    def _own(self, module: Module, node: ast.expr) -> bool:
        """Whether every worker has such a lock of its own: it keeps nobody out."""
        if isinstance(node, ast.Name):
            made = module.value(node)
            return self._is_lock(module, made) and any(each in self._workers for each in module.functions_around(made))
        if not isinstance(node, ast.Attribute):
            return False
        owner = module.class_around(node)
        if isinstance(node.value, ast.Name) and node.value.id == "self" and owner in self._thread_classes:
            values = self._flow.field_values(owner, node.attr) if owner is not None else []
            return bool(values) and all(self._is_lock(home, each) for home, each in values)
        return self._own(module, node.value)

    def _calls(self, module: Module, statement: ast.stmt, method: str) -> bool:
        """Whether the statement's own head (not its block) calls `method` of a gate."""
        heads: list[ast.AST] = [statement]
        if isinstance(statement, (ast.If, ast.While)):
            heads = [statement.test]
        elif isinstance(statement, (ast.For, ast.AsyncFor)):
            heads = [statement.iter]
        return any(
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == method
            and self.is_gate(module, node.func.value)
            for head in heads
            for node in ast.walk(head)
        )

    def _enters(self, module: Module, statement: ast.stmt) -> bool:
        """`stack.enter_context(gate)`."""
        return isinstance(statement, (ast.Expr, ast.Assign)) and any(
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "enter_context"
            and any(self.is_gate(module, each) for each in node.args)
            for node in ast.walk(statement)
        )
