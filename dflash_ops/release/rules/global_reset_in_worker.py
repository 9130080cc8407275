"""A worker that throws away what all threads have compiled or captured."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from dflash_ops.release.finding import Severity
from dflash_ops.release.resolve import Module
from dflash_ops.release.rules.base import Hit, Rule, hit_at
from dflash_ops.release.threads import Threads

_NAMES = {
    "torch.compiler.reset",
    "torch._dynamo.reset",
    "torch._dynamo.reset_code_caches",
    "torch._inductor.cudagraph_trees.reset_cudagraph_trees",
}
_WHY = (
    "resets the compiler of the whole process in a worker thread: every other worker loses its compiled code and\n"
    "compiles again where it is (outside the gate); up to torch 2.12 the call itself can assert in a thread."
)
_FIX = "drop the call, or make it in the main thread after all workers have ended"


def find(module: Module, threads: Threads) -> Iterator[Hit]:
    for place in threads.places(module):
        if isinstance(place.node, ast.Call) and module.name(place.node.func) in _NAMES:
            yield hit_at(place.node, Severity.ERROR, _WHY, _FIX)


RULE = Rule("global-reset-in-worker", find)
