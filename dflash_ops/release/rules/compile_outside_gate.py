"""torch.compile, a compiled function's first call, or a graph capture in a worker that nothing serialises.

Measured on torch 2.11: 4 threads on one GPU with code objects of their own and no lock: 2 die, since captures
invalidate each other even in thread_local mode; with a lock 12 of 12 are right. Up to torch 2.13 a compile in one
thread also makes a compiled call in another raise (the FX tracing flag is the process's).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from dflash_ops.release.finding import Severity
from dflash_ops.release.flow import Compiled
from dflash_ops.release.resolve import Module
from dflash_ops.release.rules.base import Hit, Rule, hit_at
from dflash_ops.release.rules.compile_calls import compiled_by
from dflash_ops.release.threads import Threads

_COMPILES = {"torch.compile", "torch._dynamo.optimize"}
_CAPTURES = {"torch.cuda.graph", "torch.cuda.graphs.graph", "torch.cuda.make_graphed_callables"}
_COMPILE_WORDS = {"mode", "options", "fullgraph", "dynamic", "backend"}
_WHY_COMPILE = (
    "compiles in a worker thread outside any gate: torch.compile is not thread safe. Up to torch 2.13 another\n"
    "thread's compiled call raises meanwhile, and captures break each other (torch 2.11: 2 of 4 threads died)."
)
_WHY_CAPTURE = (
    "captures a CUDA graph in a worker thread outside any gate: only one capture may be underway in a process\n"
    "(torch 2.11: 2 of 4 threads died)."
)
_WHY_CALL = (
    "the first call compiles, here in a worker thread outside any gate: torch.compile is not thread safe. Up to torch\n"
    "2.13 another thread's compiled call raises meanwhile, and captures break each other."
)
_FIX = (
    "compile, warm up (a real backward too) and capture under one lock of the process (with gate: ...), then a "
    "barrier, then train"
)


def find(module: Module, threads: Threads) -> Iterator[Hit]:
    for place in threads.places(module):
        call = place.node
        if place.gated or place.warmed or not isinstance(call, ast.Call):
            continue
        name = module.name(call.func)
        if name in _COMPILES or _compiles_in_place(module, threads, call):
            yield hit_at(call, Severity.ERROR, _WHY_COMPILE, _FIX)
        elif name in _CAPTURES or (isinstance(call.func, ast.Attribute) and call.func.attr == "capture_begin"):
            yield hit_at(call, Severity.ERROR, _WHY_CAPTURE, _FIX)
        elif any(_first_call(threads, each) for each in compiled_by(threads, module, call.func)):
            yield hit_at(call, Severity.ERROR, _WHY_CALL, _FIX)


def _compiles_in_place(module: Module, threads: Threads, call: ast.Call) -> bool:
    """`model.compile(mode=...)` of an nn.Module."""
    return (
        isinstance(call.func, ast.Attribute)
        and call.func.attr == "compile"
        and module.name(call.func) is None
        and not threads.flow.values(module, call.func)
        and bool(module.keywords(call).keys() & _COMPILE_WORDS)
    )


def _first_call(threads: Threads, compiled: Compiled) -> bool:
    """Whether nothing warms it up before: no worker inside a gate, no other thread."""
    return compiled.call not in threads.worker_nodes and compiled not in threads.warm


RULE = Rule("compile-outside-gate", find)
