"""Wrong gradients, explained: whose they are instead, where that can be told."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from trainer.canary.measure import Distance, relative
from trainer.canary.witness import Named
from trainer.step import Batch

Gradient = Callable[[Sequence[Batch]], Named]
"""The true gradient of micro-batches, at the weights and with the normaliser of the step in question."""
Candidates = Sequence[tuple[str, Sequence[Batch]]]
"""What a worker may have trained on instead: in words, and its micro-batches."""


def explain(own: Named, truth: Named, distances: Sequence[Distance], others: Gradient, candidates: Candidates) -> str:
    """What a worker's wrong gradient `own` is the right one of; empty if of nothing that comes to mind."""
    allowed = {each.name: each.allowed for each in distances}
    factor = _factor(own, truth)
    if _matches({name: each.double() / factor for name, each in own.items()}, truth, allowed):
        return f"they are {factor:.4g} times the reference's: is the normaliser the sum over all workers?"
    for what, batches in candidates:
        if _matches(own, others(batches), allowed):
            return f"they are the gradients of {what}"
    return ""


def candidates(batches: Sequence[Sequence[Batch]], worker: int, step: int, micros: int) -> Candidates:
    """What else a worker may have trained on in `step` (from 0), in words; `batches` by worker, over all steps."""
    now = slice(step * micros, (step + 1) * micros)
    own = batches[worker][now]
    found = [
        (f"drafter {other}'s batches: it trains on another's data", theirs[now])
        for other, theirs in enumerate(batches)
        if other != worker
    ]
    if step > 0:
        before = batches[worker][(step - 1) * micros : step * micros]
        found.append((f"its own batches of step {step}: its inputs are stale", before))
    if micros > 1:
        found += [("its last micro-batch alone", own[-1:]), ("all but its last micro-batch", own[:-1])]
    return found


def _factor(own: Named, truth: Named) -> float:
    """c that brings c x truth nearest to `own`; 1 where there is none."""
    products = squares = 0.0
    for name, right in truth.items():
        wide = right.double()
        products += float((own[name].to(wide.device).double() * wide).sum())
        squares += float(wide.square().sum())
    factor = products / squares if squares > 0 else 1.0
    return factor if math.isfinite(factor) and factor != 0 else 1.0


@torch.no_grad()
def _matches(own: Named, truth: Named, allowed: dict[str, float]) -> bool:
    return all(relative(own[name], truth[name]) <= allowed[name] for name in truth)
