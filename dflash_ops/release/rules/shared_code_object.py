"""Workers that compile one code object with CUDA graphs: Dynamo's cache belongs to the code object.

Measured on torch 2.11 without trees, two threads on one GPU: the second gets the graph that the first captured over its
own weights, a bare AssertionError. On one GPU a thread the numbers came out right (4 of 4), but the recompile limit (8)
is shared by all.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from dflash_ops.release.finding import Severity
from dflash_ops.release.flow import Compiled, Private
from dflash_ops.release.resolve import Module
from dflash_ops.release.rules.base import Hit, Rule, hit_at
from dflash_ops.release.rules.compile_calls import compiled_by, spelling
from dflash_ops.release.threads import Threads

_WHY = (
    "every worker compiles the same code object with CUDA graphs: a second worker on the same GPU replays the first\n"
    "one's graph over the first one's weights (torch 2.11: AssertionError), and all share the recompile limit of 8."
)
_FIX = (
    "compile a copy with a code object of the worker's own: types.FunctionType(f.__code__.replace(co_name=...), "
    "f.__globals__, ..., f.__closure__)"
)


def find(module: Module, threads: Threads) -> Iterator[Hit]:
    for place in threads.places(module):
        call = place.node
        if not isinstance(call, ast.Call):
            continue
        if module.name(call.func) == "torch.compile":
            shared = [each for each in compiled_by(threads, module, call) if _shared(threads, each)]
        else:
            # compiled once, at the top of a file, and called by all workers
            shared = [
                each
                for each in compiled_by(threads, module, call.func)
                if each.call not in threads.worker_nodes and _shared(threads, each)
            ]
        if shared:
            yield hit_at(call, Severity.WARNING, _WHY, _FIX)


def _shared(threads: Threads, compiled: Compiled) -> bool:
    spelled = spelling(compiled)
    if not spelled.graphs or spelled.isolated or compiled.function is None:
        return False
    if not isinstance(compiled.function, ast.expr):
        return True
    return any(not isinstance(each, Private) for each in threads.flow.values(compiled.module, compiled.function))


RULE = Rule("shared-code-object", find)
