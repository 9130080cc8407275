"""Other compiler configuration set where worker threads do not see it (from torch 2.12 on)."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from dflash_ops.release.finding import Severity
from dflash_ops.release.resolve import Module
from dflash_ops.release.rules import silent_eager, size_asserts_off, trees_config_outside_worker
from dflash_ops.release.rules.base import Hit, Rule, hit_at
from dflash_ops.release.rules.config_sets import DYNAMO, INDUCTOR, config_sets
from dflash_ops.release.rules.outside import Outside
from dflash_ops.release.threads import Threads

_OTHERS = {trees_config_outside_worker.KEY, size_asserts_off.KEY, *silent_eager.KEYS}  # rules of their own
_TALK = ("verbose", "log", "trace", "debug", "print", "report")  # they change no code
_PATCHES = {f"{config}.patch" for config in (DYNAMO, INDUCTOR)}
_WHY = (
    "sets a value of the compiler's configuration in a thread that is no worker: from torch 2.12 on it holds for the\n"
    "thread that sets it only (recompile_limit=64 in the main thread: 8 in a worker)."
)
_FIX = "set it at the top of each worker, or pass it per compile (options=..., from torch 2.13 on recompile_limit=...)"


def find(module: Module, threads: Threads) -> Iterator[Hit]:
    places = [each.node for each in config_sets(module) if _matters(each.key)]
    if not places or not threads.compile:
        return
    outside = Outside(module, threads)
    for node in dict.fromkeys(places):
        if outside.holds(node):
            # what is patched for a while may be for a compile of the same thread
            patched = isinstance(node, ast.Call) and module.name(node.func) in _PATCHES
            yield hit_at(node, Severity.WARNING if patched else Severity.ERROR, _WHY, _FIX)


def _matters(key: str) -> bool:
    return key not in _OTHERS and not key.startswith(_TALK)


RULE = Rule("config-outside-worker", find)
