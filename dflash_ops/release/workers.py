"""Which functions of a file run in threads that the file starts."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator

from dflash_ops.release.resolve import Module
from dflash_ops.release.scopes import Function

_METHODS = (ast.FunctionDef, ast.AsyncFunctionDef)
# callable -> position and keyword of the function that it runs in a thread
_STARTERS: dict[str, tuple[int, str]] = {
    "threading.Thread": (1, "target"),
    "threading.Timer": (1, "function"),
    "_thread.start_new_thread": (0, "function"),
    "asyncio.to_thread": (0, "func"),
    "concurrent.futures.ThreadPoolExecutor": (2, "initializer"),
    "concurrent.futures.thread.ThreadPoolExecutor": (2, "initializer"),
    "multiprocessing.pool.ThreadPool": (1, "initializer"),
}
_PROCESS_POOLS = frozenset({"concurrent.futures.ProcessPoolExecutor", "concurrent.futures.process.ProcessPoolExecutor"})


def worker_functions(module: Module) -> frozenset[Function]:
    """Functions that are a thread's target or the `run` of a Thread subclass, and those of the same file that
    such a function refers to, directly or not.

    Leans towards "worker": a method is found by its name where its object's class is not known.
    """
    return _Search(module).closure()


def thread_targets(
    module: Module,
    call: ast.Call,
    *,
    makes_thread: Callable[[ast.expr], bool],
    is_thread: Callable[[ast.ClassDef], bool],
) -> list[ast.expr]:
    """The expressions that `call` has run in a thread. `makes_thread`: whether a callee is a Thread class of the files
    at hand; `is_thread`: whether a class is one."""
    place = _starter(module, call, makes_thread, is_thread)
    if place is None:
        return []
    position, keyword = place
    given = module.keywords(call)
    return [given[keyword]] if keyword in given else call.args[position : position + 1]


def _starter(
    module: Module, call: ast.Call, makes_thread: Callable[[ast.expr], bool], is_thread: Callable[[ast.ClassDef], bool]
) -> tuple[int, str] | None:
    name = module.name(call.func)
    if name in _STARTERS:
        return _STARTERS[name]
    if makes_thread(call.func):
        return _STARTERS["threading.Thread"]
    called = call.func.attr if isinstance(call.func, ast.Attribute) else (name or "").rpartition(".")[2]
    if called == "__init__":  # super().__init__(target=...), Thread.__init__(self, target=...)
        owner = module.class_around(call)
        return (len(call.args), "target") if owner is not None and is_thread(owner) else None
    if called == "submit" and not _made_by(module, call, _PROCESS_POOLS):
        return (0, "fn")
    if called == "map" and _made_by(module, call, frozenset(_STARTERS)):
        return (0, "fn")
    if called == "run_in_executor":
        return (1, "func")
    # a Thread subclass of another file
    return _STARTERS["threading.Thread"] if called.endswith("Thread") else None


def _made_by(module: Module, call: ast.Call, makers: frozenset[str]) -> bool:
    """Whether the object whose method is called was made by one of `makers`."""
    made = module.value(call.func.value) if isinstance(call.func, ast.Attribute) else None
    return isinstance(made, ast.Call) and module.name(made.func) in makers


class _Search:
    def __init__(self, module: Module) -> None:
        self.module = module
        self.classes = [node for node in module.nodes if isinstance(node, ast.ClassDef)]

    def closure(self) -> frozenset[Function]:
        found: set[Function] = set()
        waiting = list(self._roots())
        while waiting:
            function = waiting.pop()
            if function not in found:
                found.add(function)
                body = [function.body] if isinstance(function, ast.Lambda) else function.body
                for statement in body:
                    for node in ast.walk(statement):
                        if isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Load):
                            waiting += self._functions(node)
        return frozenset(found)

    def _roots(self) -> Iterator[Function]:
        for owner in self.classes:
            if self._is_thread(owner):
                yield from _methods(owner, "run")
        for call in self.module.calls:
            for target in self._targets(call):
                yield from self._functions(target)

    def _is_thread(self, owner: ast.ClassDef, depth: int = 0) -> bool:
        return depth < len(self.classes) + 1 and any(
            self.module.name(base) in {"threading.Thread", "threading.Timer"}
            or any(
                isinstance(parent, ast.ClassDef) and self._is_thread(parent, depth + 1)
                for parent in self.module.definitions(base)
            )
            for base in owner.bases
        )

    def _targets(self, call: ast.Call) -> list[ast.expr]:
        return thread_targets(
            self.module,
            call,
            makes_thread=lambda made: any(
                isinstance(each, ast.ClassDef) and self._is_thread(each) for each in self.module.definitions(made)
            ),
            is_thread=self._is_thread,
        )

    def _functions(self, node: ast.expr, depth: int = 0) -> list[Function]:
        """The functions of this file that `node` may stand for; a class stands for its `__init__`."""
        node = self.module.value(node)
        if isinstance(node, ast.Call) and depth < 5:
            partial = self.module.name(node.func) == "functools.partial"
            return self._functions(node.args[0], depth + 1) if partial and node.args else []
        if isinstance(node, ast.Attribute):
            return self._by_method_name(node)
        found: list[Function] = []
        for definition in self.module.definitions(node):
            if isinstance(definition, ast.ClassDef):
                found += _methods(definition, "__init__")
            else:
                found.append(definition)
        return found

    def _by_method_name(self, node: ast.Attribute) -> list[Function]:
        if self.module.name(node) is not None:  # something imported
            return []
        if isinstance(node.value, ast.Name) and node.value.id in {"self", "cls"}:
            owner = self.module.class_around(node)
            own = _methods(owner, node.attr) if owner is not None else []
            if own:
                return own
        return [method for owner in self.classes for method in _methods(owner, node.attr)]


def _methods(owner: ast.ClassDef, name: str) -> list[Function]:
    return [node for node in owner.body if isinstance(node, _METHODS) and node.name == name]
