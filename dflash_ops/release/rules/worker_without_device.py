"""A worker that captures CUDA graphs and never makes its device the current one."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from dflash_ops.release.finding import Severity
from dflash_ops.release.resolve import Module
from dflash_ops.release.rules.base import Hit, Rule, hit_at
from dflash_ops.release.rules.compile_calls import compiled_by, with_graphs
from dflash_ops.release.threads import Threads

_CAPTURES = {"torch.cuda.graph", "torch.cuda.graphs.graph"}
_WHY = (
    "captures CUDA graphs in a thread that never sets its device: without trees inductor captures on the current one\n"
    "(device 0 in a new thread); elsewhere the graph is empty, and outputs go stale with only a UserWarning."
)
_FIX = "torch.cuda.set_device(device) at the top of the worker, before anything else touches CUDA"


def find(module: Module, threads: Threads) -> Iterator[Hit]:
    for place in threads.places(module):
        call = place.node
        if not isinstance(call, ast.Call):
            continue
        name = module.name(call.func)
        compiles = name == "torch.compile" and with_graphs(compiled_by(threads, module, call))
        if (compiles or name in _CAPTURES) and threads.without_device(place.function):
            given = threads.given_device(place.function)
            yield hit_at(call, Severity.ERROR if given else Severity.WARNING, _WHY, _FIX)


RULE = Rule("worker-without-device", find)
