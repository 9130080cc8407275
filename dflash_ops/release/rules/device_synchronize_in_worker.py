"""`torch.cuda.synchronize()` in a worker, outside the gate: it waits for what other threads do on that device.

CUDA's cudaDeviceSynchronize fails on a device that has a capturing stream, and breaks that capture, whatever the
capture's mode (NVIDIA in TensorRT issue #2888).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from dflash_ops.release.finding import Severity
from dflash_ops.release.resolve import Module
from dflash_ops.release.rules.base import Hit, Rule, hit_at
from dflash_ops.release.scopes import Element
from dflash_ops.release.threads import Threads

_NAMES = {"torch.cuda.synchronize", "torch.accelerator.synchronize"}
_WHY_NOT_ITS_OWN = (
    "waits for a whole device in a thread that has none of its own: where a worker captures on that device, the call\n"
    "fails (CUDA error 900) and breaks the capture, in every capture mode."
)
_WHY_OWN = (
    "waits for all streams of the device, other workers' too, in a worker outside the gate; where one of them\n"
    "captures, the call fails (CUDA error 900) and breaks the capture, in every capture mode."
)
_FIX = "wait for this thread's work only: torch.cuda.current_stream(device).synchronize(), or an event's synchronize()"


def find(module: Module, threads: Threads) -> Iterator[Hit]:
    # where nothing is captured, nothing breaks: it only waits too long
    severity = Severity.ERROR if threads.spell_graphs else Severity.WARNING
    for place in threads.places(module):
        call = place.node
        if place.gated or not isinstance(call, ast.Call) or module.name(call.func) not in _NAMES:
            continue
        given = [*call.args, *module.keywords(call).values()]
        if any(_one_of_many(module, each) for each in given) or (not given and threads.without_device(place.function)):
            yield hit_at(call, severity, _WHY_NOT_ITS_OWN, _FIX)
        elif not given:
            yield hit_at(call, severity, _WHY_OWN, _FIX)


def _one_of_many(module: Module, node: ast.expr) -> bool:
    """A loop over devices: at most one of them is the thread's own."""
    return isinstance(node, ast.Name) and any(isinstance(each, Element) for each in module.scopes[node].lookup(node.id))


RULE = Rule("device-synchronize-in-worker", find)
