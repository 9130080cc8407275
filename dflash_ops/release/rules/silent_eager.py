"""Settings that turn a compiler's error into uncompiled code, without a word."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from dflash_ops.release.finding import Severity
from dflash_ops.release.resolve import Module, text
from dflash_ops.release.rules.base import Hit, Rule, hit_at
from dflash_ops.release.rules.config_sets import DYNAMO, config_sets, is_literal
from dflash_ops.release.threads import Threads

KEYS = {"error_on_nested_fx_trace": False, "suppress_errors": True}
_STANCES = {"force_eager", "eager_on_recompile"}
_WHY_CONFIG = (
    "turns an error of the compiler into an eager call: when threads meet in a compile (torch up to 2.13), a worker\n"
    "then runs uncompiled, without its graphs, and nothing says so."
)
_FIX_CONFIG = "drop the setting, and compile under one lock of the process: then there is no error to hide"
_WHY_STANCE = (
    "the stance is the process's: from here on the compiled code of every thread may run eager, without its graphs,\n"
    "and nothing says so."
)
_FIX_STANCE = 'after the warm-up set "fail_on_recompile"; for an eager reference call the uncompiled function'


def find(module: Module, threads: Threads) -> Iterator[Hit]:
    for each in config_sets(module):
        hides = each.config == DYNAMO and each.key in KEYS and is_literal(module, each.value, KEYS[each.key])
        if hides and threads.train:
            yield hit_at(each.node, Severity.ERROR, _WHY_CONFIG, _FIX_CONFIG)
    for place in threads.places(module):
        call = place.node
        if isinstance(call, ast.Call) and module.name(call.func) == "torch.compiler.set_stance":
            stance = module.keywords(call).get("stance", call.args[0] if call.args else None)
            if stance is not None and text(module.value(stance)) in _STANCES:
                yield hit_at(call, Severity.ERROR, _WHY_STANCE, _FIX_STANCE)


RULE = Rule("silent-eager", find)
