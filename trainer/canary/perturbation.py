"""The negative control of the numbers: a gradient made wrong must be seen by the comparison that judges the workers."""

from __future__ import annotations

import torch

from trainer.canary.evidence import Check, Outcome
from trainer.canary.measure import compare, worst
from trainer.canary.noise import Noise
from trainer.canary.witness import Named

# by dtype: an error that any useful tolerance must show
_LIMITS = {torch.float32: 0.01, torch.bfloat16: 0.5}
_TOLERANCES = 2.5


@torch.no_grad()
def perturbed_gradient(own: Named, truth: Named, noise: Noise, dtype: torch.dtype) -> Check:
    """One worker's gradient of its smallest parameter, made wrong by a little more than the tolerance.

    A comparison that does not see it proves nothing; nor does a tolerance so wide that no small error is beyond it.
    """
    sizes = {name: float(torch.linalg.vector_norm(each.double())) for name, each in own.items()}
    name = min((each for each in sizes if sizes[each] > 0), key=lambda each: sizes[each], default=next(iter(own)))
    as_it_is = compare(own, truth, noise.allowed)
    allowed = {each.name: each.allowed for each in as_it_is}[name]
    error = min(_TOLERANCES * allowed, _LIMITS[dtype])
    wrong = compare({**own, name: own[name].double() * (1.0 + error)}, truth, noise.allowed)
    found = {each.name: each for each in wrong}[name]
    # where another parameter is wrong already, that one may stay the worst
    noticed = not found.good and (worst(wrong).name == name or not worst(as_it_is).good)
    summary = f"{name} made wrong by {error:.1e}: {'noticed' if noticed else 'not noticed'}"
    figures = {"worst": found.worst, "tolerance": found.allowed, "error": error}
    return Check("negative_control", None, Outcome.PASS if noticed else Outcome.INCONCLUSIVE, summary, figures)
