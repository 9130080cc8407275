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

    A comparison that does not see it proves nothing. A tolerance that lets any error pass says nothing of its
    parameter: the gradient is little more than rounding, as of a drafter that has learned its rows by heart. Of a
    minority of the parameters that is said, and the smallest of the others is taken; beyond that nothing is proved.
    """
    limit = _LIMITS[dtype]
    blind = [name for name in own if noise.allowed(name) >= limit]
    enough = 2 * len(blind) < len(own)
    sizes = {name: float(torch.linalg.vector_norm(each.double())) for name, each in own.items()}
    judged = [name for name in own if sizes[name] > 0 and not (enough and name in blind)]
    name = min(judged, key=lambda each: sizes[each], default=next(iter(own)))
    error = min(_TOLERANCES * noise.allowed(name), limit)
    as_it_is = compare(own, truth, noise.allowed)
    wrong = compare({**own, name: own[name].double() * (1.0 + error)}, truth, noise.allowed)
    found = {each.name: each for each in wrong}[name]
    # where another parameter is wrong already, that one may stay the worst
    noticed = enough and not found.good and (worst(wrong).name == name or not worst(as_it_is).good)
    summary = f"{name} made wrong by {error:.1e}: {'noticed' if noticed else 'not noticed'}"
    if blind:
        summary += f"; right code differs too much to judge {len(blind)} of {len(own)} parameters, as {blind[0]}"
    figures = {"worst": found.worst, "tolerance": found.allowed, "error": error, "not_judged": len(blind)}
    return Check("negative_control", None, Outcome.PASS if noticed else Outcome.INCONCLUSIVE, summary, figures)
