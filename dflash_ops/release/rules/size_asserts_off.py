"""Inductor's checks of sizes and addresses switched off.

Measured on torch 2.11 without trees, 4 threads on one GPU that share a code object: with the checks the threads raise;
without them one ran all its steps on another replica's weights, gradients off by 1.53 relative, and no error.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from dflash_ops.release.finding import Severity
from dflash_ops.release.resolve import Module, text
from dflash_ops.release.rules.base import Hit, Rule, hit_at
from dflash_ops.release.rules.config_sets import INDUCTOR, config_sets, environment_sets, is_literal
from dflash_ops.release.threads import Threads

KEY = "size_asserts"
_VARIABLE = "TORCHINDUCTOR_SIZE_ASSERTS"
_WHY = (
    "switches off the only check that a replayed graph still has its own weights: on torch 2.11 a thread then trained\n"
    "on another replica's weights, gradients off by 1.53 relative, with no error."
)
_FIX = "leave it on; it costs one data_ptr() for each static input and step"


def find(module: Module, threads: Threads) -> Iterator[Hit]:
    severity = Severity.ERROR if threads.train else Severity.WARNING
    for each in config_sets(module):
        if (each.config, each.key) == (INDUCTOR, KEY) and is_literal(module, each.value, False):
            yield hit_at(each.node, severity, _WHY, _FIX)
    for node, name, value in environment_sets(module):
        if name == _VARIABLE and text(module.value(value)) == "0":
            yield hit_at(node, severity, _WHY, _FIX)
    for call in module.calls:
        options = module.keywords(call).get("options") if _may_compile(module, call) else None
        if options is not None and is_literal(module, module.items(options).get(KEY), False):
            yield hit_at(call, severity, _WHY, _FIX)


def _may_compile(module: Module, call: ast.Call) -> bool:
    partial = module.name(call.func) == "functools.partial" and bool(call.args)
    return module.name(call.args[0] if partial else call.func) == "torch.compile"


RULE = Rule("size-asserts-off", find)
