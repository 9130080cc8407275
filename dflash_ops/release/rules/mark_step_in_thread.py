"""`cudagraph_mark_step_begin` where threads train: its counter is the process's, not the thread's."""

from __future__ import annotations

from collections.abc import Iterator

from dflash_ops.release.finding import Severity
from dflash_ops.release.resolve import Module
from dflash_ops.release.rules.base import Hit, Rule, hit_at
from dflash_ops.release.threads import Threads

_NAMES = {"torch.compiler.cudagraph_mark_step_begin", "torch._inductor.cudagraph_trees.mark_step_begin"}
_WHY = (
    "marks a step for the whole process (any torch up to 2.15): with CUDAGraph Trees it ends the generation of other\n"
    "threads between their forward and backward; without trees it does nothing."
)
_FIX = "drop the call; a worker's own forward and backward begin and end its steps"


def find(module: Module, threads: Threads) -> Iterator[Hit]:
    calls = [call for call in module.calls if module.name(call.func) in _NAMES]
    if not calls:
        return
    in_workers = {place.node for place in threads.places(module)}
    for call in calls:
        if call in in_workers:
            yield hit_at(call, Severity.ERROR, _WHY, _FIX)
        elif threads.train:
            yield hit_at(call, Severity.WARNING, _WHY, _FIX)


RULE = Rule("mark-step-in-thread", find)
