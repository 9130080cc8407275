"""Which lines of a file surely run in no worker."""

from __future__ import annotations

import ast

from dflash_ops.release.resolve import Module
from dflash_ops.release.threads import Threads
from dflash_ops.release.workers import worker_functions


class Outside:
    """Leans towards "worker": what looks like one in the file, and what the release runs in one."""

    def __init__(self, module: Module, threads: Threads) -> None:
        self._module = module
        self._workers = worker_functions(module) | threads.functions
        self._decorated = {
            decorator: node
            for node in module.nodes
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
            for decorator in node.decorator_list
        }

    def holds(self, node: ast.expr) -> bool:
        # a patch as a decorator takes effect in the thread that calls the function
        around = {*self._module.functions_around(node), self._decorated.get(node)}
        return not around & self._workers
