"""A worker that seeds or restores the default generators of the whole process."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from dflash_ops.release.finding import Severity
from dflash_ops.release.resolve import Module
from dflash_ops.release.rules.base import Hit, Rule, hit_at
from dflash_ops.release.threads import Threads

_SEEDS = {
    "torch.manual_seed", "torch.seed", "torch.random.manual_seed", "torch.random.seed", "torch.set_rng_state",
    "torch.random.set_rng_state", "torch.cuda.manual_seed_all", "torch.cuda.seed_all", "torch.cuda.set_rng_state_all",
    "torch.default_generator.manual_seed", "transformers.set_seed", "lightning.seed_everything",
    "accelerate.utils.set_seed",
}  # fmt: skip
_DEVICE_SEEDS = {
    "torch.cuda.manual_seed", "torch.cuda.seed", "torch.cuda.set_rng_state", "torch.cuda.random.manual_seed",
    "torch.random.fork_rng",
}  # fmt: skip
_WHY = (
    "seeds or restores default generators of the whole process in a worker thread, outside the gate: every other\n"
    "thread's numbers start again with it, and two workers draw the same ones."
)
_WHY_DEVICE = (
    "seeds or restores a device's default generator in a worker thread, outside the gate: other threads that draw\n"
    "from it meanwhile get the same numbers again."
)
_FIX = "a generator of the worker's own: torch.Generator(device).manual_seed(seed), given to each draw"


def find(module: Module, threads: Threads) -> Iterator[Hit]:
    for place in threads.places(module):
        call = place.node
        if place.gated or not isinstance(call, ast.Call):
            continue
        name = module.name(call.func)
        if name in _SEEDS:
            yield hit_at(call, Severity.ERROR, _WHY, _FIX)
        elif name in _DEVICE_SEEDS:
            yield hit_at(call, Severity.WARNING, _WHY_DEVICE, _FIX)


RULE = Rule("global-seed-in-worker", find)
