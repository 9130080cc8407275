"""An optimiser's step compiled with CUDA graphs and without trees: its first call updates twice.

Without trees, inductor's first call runs the function once for real and then replays it, so what it changes in place
is changed twice (measured on torch 2.11 with BatchNorm: num_batches_tracked is 2 after one call).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from dflash_ops.release.finding import Severity
from dflash_ops.release.flow import Compiled
from dflash_ops.release.resolve import Module
from dflash_ops.release.rules.base import Hit, Rule, hit_at
from dflash_ops.release.rules.compile_calls import spelling
from dflash_ops.release.scopes import own_nodes
from dflash_ops.release.threads import Threads

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_OPTIMIZER = re.compile(r"(^|_)(opts?|optims?|optimi[sz]ers?|adamw?|sgd|muon|lion|adafactor)(_|$)")
_WHY = (
    "compiles an optimiser's step with CUDA graphs and without trees: the first call runs it for real and then\n"
    "replays it, so the first update happens twice (torch 2.11 to 2.15)."
)
_WHY_MODE = (
    "compiles an optimiser's step with CUDA graphs where threads train: where the trees are off, the first call runs\n"
    "it for real and then replays it, so the first update happens twice (torch 2.11 to 2.15)."
)
_FIX = (
    "leave the step out of the compile (fused=True costs few launches), or set the option "
    '"triton.cudagraph_support_input_mutation": False'
)


def find(module: Module, threads: Threads) -> Iterator[Hit]:
    for compiled in _compiles(module, threads):
        spelled = spelling(compiled)
        if not spelled.graphs or spelled.mutation_off or not _steps(module, threads, compiled):
            continue
        if spelled.trees_off:
            yield hit_at(compiled.call, Severity.ERROR, _WHY, _FIX)
        elif threads.train:
            yield hit_at(compiled.call, Severity.WARNING, _WHY_MODE, _FIX)


def _compiles(module: Module, threads: Threads) -> Iterator[Compiled]:
    for call in module.calls:
        if module.name(call.func) == "torch.compile" and call.args:
            yield Compiled(call, module, call.args[0])
    for node in module.nodes:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for decorator in node.decorator_list:
                found = threads.flow.compiled_by_decorator(module, decorator, node)
                if found is not None:
                    yield found


def _steps(module: Module, threads: Threads, compiled: Compiled) -> bool:
    function = compiled.function
    if isinstance(function, ast.Attribute):
        shown = module.value(function)
        if isinstance(shown, ast.Attribute) and _is_step(module, shown):
            return True
    if isinstance(function, ast.expr):
        shown = module.value(function)
        if isinstance(shown, ast.Attribute) and _is_step(module, shown):
            return True
        functions = list(threads.flow.run_by(threads.flow.values(module, function)))
    else:
        functions = [function] if isinstance(function, _FUNCTIONS) else []
    return any(
        isinstance(node, ast.Call) and _is_step(threads.home(each), node.func)
        for each in functions
        for node in own_nodes(each)
    )


def _is_step(module: Module, node: ast.expr) -> bool:
    """`optimizer.step`: of something named so, or made by torch.optim."""
    if not isinstance(node, ast.Attribute) or node.attr != "step":
        return False
    owner = node.value
    made = module.value(owner)
    if isinstance(made, ast.Call) and (module.name(made.func) or "").startswith("torch.optim."):
        return not (module.name(made.func) or "").startswith("torch.optim.lr_scheduler.")
    name = owner.attr if isinstance(owner, ast.Attribute) else owner.id if isinstance(owner, ast.Name) else ""
    return bool(_OPTIMIZER.search(name.lower()))


RULE = Rule("compiled-optimizer-step", find)
