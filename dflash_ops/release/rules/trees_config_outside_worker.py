"""`torch._inductor.config.triton.cudagraph_trees` set where worker threads do not see it.

From torch 2.12 on, inductor's configuration is a ContextVar and a new thread starts with an empty context
(pytorch PR #173568, issue #186537): the worker compiles with the default, trees on.
"""

from __future__ import annotations

from collections.abc import Iterator

from dflash_ops.release.finding import Severity
from dflash_ops.release.resolve import Module
from dflash_ops.release.rules.base import Hit, Rule, hit_at
from dflash_ops.release.rules.config_sets import INDUCTOR, config_sets
from dflash_ops.release.rules.outside import Outside
from dflash_ops.release.threads import Threads

KEY = "triton.cudagraph_trees"
_WHY = (
    "sets triton.cudagraph_trees in a thread that is no worker: from torch 2.12 on the value holds for the thread\n"
    "that sets it only, so worker threads compile with the default (trees on)."
)
_FIX = (
    "pass it per compile: "
    'options={**torch._inductor.list_mode_options("reduce-overhead"), "triton.cudagraph_trees": False}'
)


def find(module: Module, threads: Threads) -> Iterator[Hit]:
    places = [each.node for each in config_sets(module) if (each.config, each.key) == (INDUCTOR, KEY)]
    if not places:
        return
    outside = Outside(module, threads)
    for node in places:
        if outside.holds(node):
            yield hit_at(node, Severity.ERROR, _WHY, _FIX)


RULE = Rule("trees-config-outside-worker", find)
