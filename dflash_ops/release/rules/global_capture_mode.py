"""A capture in CUDA's global mode where other threads work: any allocation in any of them breaks it."""

from __future__ import annotations

from collections.abc import Iterator

from dflash_ops.release.finding import Severity
from dflash_ops.release.resolve import Module, text
from dflash_ops.release.rules.base import Hit, Rule, hit_at
from dflash_ops.release.threads import Threads

_GRAPHS = {"torch.cuda.graph", "torch.cuda.graphs.graph"}
_CALLABLES = {"torch.cuda.make_graphed_callables", "torch.cuda.graphs.make_graphed_callables"}
_MODE = 3  # its position among the arguments of torch.cuda.graph
_WHY = (
    "captures in CUDA's global mode (the default here) where threads train: a cudaMalloc in any thread, on any\n"
    "device, fails meanwhile (CUDA error 900) and invalidates this capture (901)."
)
_FIX = 'torch.cuda.graph(graph, stream=own, capture_error_mode="thread_local"), inside the gate'
_FIX_CALLABLES = f"{_FIX}; make_graphed_callables has no mode before torch 2.14"


def find(module: Module, threads: Threads) -> Iterator[Hit]:
    if not threads.train:
        return
    for call in module.calls:
        name = module.name(call.func)
        if name not in _GRAPHS | _CALLABLES:
            continue
        mode = module.keywords(call).get("capture_error_mode")
        if mode is None and name in _GRAPHS and len(call.args) > _MODE:
            mode = call.args[_MODE]
        if mode is None or text(module.value(mode)) == "global":
            # the main thread may capture while all workers stand still, a worker stands among others
            severity = Severity.ERROR if call in threads.worker_nodes else Severity.WARNING
            yield hit_at(call, severity, _WHY, _FIX_CALLABLES if name in _CALLABLES else _FIX)


RULE = Rule("global-capture-mode", find)
