"""How a torch.compile is spelled: with CUDA graphs or not, with trees or not."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from dflash_ops.release.flow import Compiled
from dflash_ops.release.resolve import Module, text
from dflash_ops.release.rules.config_sets import is_literal
from dflash_ops.release.threads import Threads

_GRAPH_MODES = {"reduce-overhead", "max-autotune"}


@dataclass(frozen=True)
class Spelling:
    """What the call itself says. `graphs`: CUDA graphs are on. `trees_off`: and CUDAGraph Trees are off.
    `mutation_off`: a graph that writes to its inputs is not captured. `isolated`: it has a cache of its own."""

    graphs: bool
    trees_off: bool
    mutation_off: bool
    isolated: bool


def spelling(compiled: Compiled) -> Spelling:
    module, call = compiled.module, compiled.call
    given = module.keywords(call) if isinstance(call, ast.Call) else {}
    options = module.items(given["options"]) if "options" in given else {}
    modes = {text(module.value(given["mode"]))} if "mode" in given else set()
    if "options" in given:
        modes |= _listed_modes(module, module.value(given["options"]))
    return Spelling(
        graphs=bool(modes & _GRAPH_MODES) or is_literal(module, options.get("triton.cudagraphs"), True),
        trees_off=is_literal(module, options.get("triton.cudagraph_trees"), False),
        mutation_off=is_literal(module, options.get("triton.cudagraph_support_input_mutation"), False),
        isolated=is_literal(module, given.get("isolate_recompiles"), True),
    )


def _listed_modes(module: Module, options: ast.expr) -> set[str | None]:
    """The modes whose options are taken over: `list_mode_options("reduce-overhead")`."""
    return {
        text(node.args[0])
        for node in ast.walk(options)
        if isinstance(node, ast.Call)
        and node.args
        and (module.name(node.func) or "") == "torch._inductor.list_mode_options"
    }


def compiled_by(threads: Threads, module: Module, node: ast.expr) -> list[Compiled]:
    """The compiled functions that `node` may stand for, by place."""
    found = [value for value in threads.flow.values(module, node) if isinstance(value, Compiled)]
    return sorted(found, key=lambda each: (each.call.lineno, each.call.col_offset))


def with_graphs(compiled: list[Compiled]) -> list[Compiled]:
    return [each for each in compiled if spelling(each).graphs]
