"""A capture in CUDA's global mode where other threads work: any allocation in any of them breaks it."""

from __future__ import annotations

from collections.abc import Iterator

from dflash_ops.release.finding import Severity
from dflash_ops.release.resolve import Module, text
from dflash_ops.release.rules.base import Hit, Rule, hit_at
from dflash_ops.release.threads import Threads

_GRAPHS = {"torch.cuda.graph", "torch.cuda.graphs.graph"}
_CALLABLES = {"torch.cuda.make_graphed_callables", "torch.cuda.graphs.make_graphed_callables"}
_WHY = (
    "captures in CUDA's global mode (the default here) where threads train: a cudaMalloc in any thread, on any\n"
    "device, fails meanwhile (CUDA error 900) and invalidates this capture (901)."
)
_FIX = 'torch.cuda.graph(graph, stream=own, capture_error_mode="thread_local"), inside the gate'
_FIX_CALLABLES = f"{_FIX}; make_graphed_callables has no mode before torch 2.14"


def find(module: Module, threads: Threads) -> Iterator[Hit]:
    for call in module.calls:
        name = module.name(call.func)
        if name in _CALLABLES and threads.train:
            yield hit_at(call, Severity.WARNING, _WHY, _FIX_CALLABLES)
        elif name in _GRAPHS and threads.train:
            mode = module.keywords(call).get("capture_error_mode", call.args[3] if len(call.args) > 3 else None)
            if mode is None or text(module.value(mode)) == "global":
                yield hit_at(call, Severity.WARNING, _WHY, _FIX)


RULE = Rule("global-capture-mode", find)
