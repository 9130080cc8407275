"""The update against AdamW written out: one step on from the replicas' own state before it.

The state is copied while all stand still after a step, from the same bits that were just compared, so that step by
step all of training is covered, from the first weights on: the parameters after the last step are right if each step
was.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.canary.measure import Distance, relative, tolerance
from trainer.canary.witness import Named, WorkerRecord, host_copy

_MOMENTS = ("exp_avg", "exp_avg_sq")
# one float32 number scales all gradients: a rounding of the norm, and of the factor, is in every tensor, squared in
# the second moments; measuring it once could hit upon a lucky one
_CLIPPING_NOISE = 2 * torch.finfo(torch.float32).eps


@dataclass(frozen=True)
class AdamWRule:
    """AdamW with clipping as the papers have it, without torch.optim: decoupled decay, bias correction.

    The learning rate is `peak` divided by the number of the step: another one each step, so that a frozen one is seen.
    """

    peak: float
    betas: tuple[float, float]
    weight_decay: float
    clip: float
    epsilon: float = 1e-8

    def rate(self, step: int) -> float:
        """The learning rate of `step` (from 0)."""
        return self.peak / (step + 1)

    def clipping(self, gradients: Named, dtype: torch.dtype) -> float:
        """What the gradients are multiplied by; their norm is computed in `dtype`."""
        norms = torch.stack([torch.linalg.vector_norm(each.detach().to(dtype)) for each in gradients.values()])
        return float((self.clip / (torch.linalg.vector_norm(norms) + 1e-6)).clamp(max=1.0))

    def update(self, before: TensorState, gradient: Tensor, step: int, rate: float) -> TensorState:
        """One tensor after `step` (from 0), computed in the dtype of `before`; `gradient` is clipped."""
        beta1, beta2 = self.betas
        first = before.exp_avg * beta1 + gradient * (1 - beta1)
        second = before.exp_avg_sq * beta2 + gradient * gradient * (1 - beta2)
        root = (second / (1 - beta2 ** (step + 1))).sqrt() + self.epsilon
        moved = rate * (first / (1 - beta1 ** (step + 1))) / root
        return TensorState(before.value * (1 - rate * self.weight_decay) - moved, first, second)


RULE = AdamWRule(peak=1e-3, betas=(0.9, 0.95), weight_decay=0.01, clip=1.0)


@dataclass(frozen=True)
class TensorState:
    """One parameter with its optimiser's state: what is updated (its master copy, if any) and both moments."""

    value: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor

    def to(self, device: torch.device, dtype: torch.dtype) -> TensorState:
        """The same elsewhere."""
        return TensorState(*(each.to(device, dtype) for each in (self.value, self.exp_avg, self.exp_avg_sq)))


State = dict[str, TensorState]


def state_of(worker: WorkerRecord) -> State:
    """The replica's own tensors; what the optimiser has not made yet is zero."""
    kept = worker.trained.optimizer.state_tensors()
    found = {}
    for name, parameter in worker.trained.drafter.named_parameters():
        value = kept.get(f"master.{name}", parameter.detach())
        moments = [kept.get(f"{key}.{name}") for key in _MOMENTS]
        found[name] = TensorState(value, *(torch.zeros_like(value) if each is None else each for each in moments))
    return found


def host_state(worker: WorkerRecord) -> State:
    """A copy in host memory: 12 bytes a parameter, 6 where bfloat16 has no master copies."""
    return {
        name: TensorState(host_copy(each.value), host_copy(each.exp_avg), host_copy(each.exp_avg_sq))
        for name, each in state_of(worker).items()
    }


def _unrounded(found: Tensor, truth: Tensor, kept: torch.dtype) -> Tensor:
    """Of the numbers that round to `found` in the dtype `kept` the nearest to `truth`; in float32 that is `found`."""
    if kept == torch.float32:
        return found
    wide = found.double()
    # half the way to the next number; of 0 there is no power of two
    half = torch.ldexp((wide != 0).double() * torch.finfo(kept).eps / 4, torch.frexp(wide).exponent)
    # not a clamp, which might let a number pass that is none
    return torch.maximum(torch.minimum(truth, wide + half), wide - half)


@torch.no_grad()
def judge_update(worker: WorkerRecord, before: State, step: int, kept: torch.dtype) -> list[Distance]:
    """A replica after `step` (from 0) against `before` updated by its own gradients at its own learning rate.

    Values relative to how far they moved, moments to themselves. `kept`: the dtype in which the workload keeps them,
    float32 unless it wants no master copies. Then a number is as far off as the nearest that would be kept as it, and
    clipped gradients may be rounded too, which is measured.
    """
    gradients = worker.gradients
    scale, narrow_scale = (RULE.clipping(gradients, dtype) for dtype in (torch.float64, torch.float32))
    rate = float(worker.trained.step.rate)
    distances = []
    for name, seen in state_of(worker).items():
        device = seen.value.device
        start = before[name].to(device, torch.float64)
        clipped = gradients[name].double() * scale
        truth = RULE.update(start, clipped, step, rate)
        narrow = (gradients[name].float() * narrow_scale).to(kept).float()
        plain = RULE.update(before[name].to(device, torch.float32), narrow, step, rate).to(device, kept)
        moved = truth.value - start.value
        for key, scaled in (("value", moved), *((moment, None) for moment in _MOMENTS)):
            right = getattr(truth, key)
            found, rounded = (_unrounded(getattr(each, key), right, kept) for each in (seen, plain))
            noise = max(relative(rounded, right, scaled), _CLIPPING_NOISE)
            allowed = tolerance(noise, kept)
            named = name if key == "value" else f"{key} of {name}"
            distances.append(Distance(named, relative(found, right, scaled), allowed))
    for name, parameter in worker.trained.drafter.named_parameters():
        master = state_of(worker)[name].value
        if not torch.equal(master.to(parameter.dtype), parameter.detach()):
            distances.append(Distance(f"{name} (is not its master copy)", float("inf"), 0.0))
    return distances
