"""The optimiser: the last part of a training step. AdamW, clipped, with float32 master weights under bfloat16."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from trainer.errors import InputError

_STATE = ("exp_avg", "exp_avg_sq", "step")
_NARROW = (torch.bfloat16, torch.float16)


def learning_rate_at(step: int, *, steps: int, peak: float, warmup_ratio: float) -> float:
    """Learning rate of optimiser step `step` (from 0): linear warm-up, then a cosine to zero at `steps`."""
    warm = math.ceil(steps * warmup_ratio)
    if step < warm:
        return peak * (step + 1) / warm
    return peak * 0.5 * (1.0 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))


class MasterAdamW:
    """AdamW over named parameters of one replica.

    `rate` is a 0-dim float32 tensor on the parameters' device: a Python number would be frozen into a captured graph.
    Gradients stay allocated; `zero_gradients` writes zeros into them. Under bfloat16 parameters the update happens in
    float32 copies, which then round into the parameters.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[str, nn.Parameter]],
        *,
        betas: tuple[float, float],
        weight_decay: float,
        clip: float,
    ) -> None:
        self._named = list(parameters)
        self._clip = clip
        self._masters = [
            nn.Parameter(each.detach().float()) if each.dtype in _NARROW else each for _, each in self._named
        ]
        for _, each in self._named:
            if each.grad is None:
                each.grad = torch.zeros_like(each)
        self.rate = torch.zeros((), device=self._masters[0].device)
        self._adamw = torch.optim.AdamW(self._masters, lr=self.rate, betas=betas, weight_decay=weight_decay, fused=True)

    @property
    def gradients(self) -> list[Tensor]:
        """The parameters' gradients, in a fixed order, always the same tensors."""
        return [each.grad for _, each in self._named if each.grad is not None]

    def zero_gradients(self) -> None:
        """Set every gradient to zero in place."""
        torch._foreach_zero_(self.gradients)

    @torch.no_grad()
    def step(self) -> Tensor:
        """Clip, update, and return the gradient norm before clipping (0-dim float32)."""
        narrow = [
            (parameter, master)
            for (_, parameter), master in zip(self._named, self._masters, strict=True)
            if parameter is not master
        ]
        for parameter, master in narrow:
            assert parameter.grad is not None
            if master.grad is None:
                master.grad = parameter.grad.to(master.dtype)
            else:
                master.grad.copy_(parameter.grad)
        norm = nn.utils.clip_grad_norm_(self._masters, self._clip)
        self._adamw.step()
        for parameter, master in narrow:
            parameter.copy_(master)
        return norm

    def state_tensors(self) -> dict[str, Tensor]:
        """Everything that the next step depends on besides parameters and rate, by flat names."""
        state: dict[str, Tensor] = {}
        for (name, parameter), master in zip(self._named, self._masters, strict=True):
            if parameter is not master:
                state[f"master.{name}"] = master.detach()
            for key in _STATE:
                kept = self._adamw.state[master].get(key)
                if kept is not None:
                    state[f"{key}.{name}"] = kept
        return state

    @torch.no_grad()
    def load_state_tensors(self, state: Mapping[str, Tensor]) -> None:
        """Continue from `state_tensors` of another process. Raises `InputError` where it does not fit."""
        left = dict(state)
        for (name, parameter), master in zip(self._named, self._masters, strict=True):
            if parameter is not master:
                master.copy_(_take(left, f"master.{name}", master))
            if f"step.{name}" in left:
                device = master.device
                self._adamw.state[master] = {
                    "step": left.pop(f"step.{name}").to(device, copy=True),
                    "exp_avg": _take(left, f"exp_avg.{name}", master).to(device, copy=True),
                    "exp_avg_sq": _take(left, f"exp_avg_sq.{name}", master).to(device, copy=True),
                }
        if left:
            raise InputError(
                f"the optimiser's state has {sorted(left)[0]!r}, which this drafter has not",
                "training.resume_from",
                "resume with the workload of the checkpoint (dtype, draft_layers)",
            )


def _take(state: dict[str, Tensor], name: str, like: Tensor) -> Tensor:
    found = state.pop(name, None)
    if found is None or found.shape != like.shape:
        raise InputError(
            f"the optimiser's state has no {name!r} of shape {tuple(like.shape)}",
            "training.resume_from",
            "resume with the workload of the checkpoint (dtype, draft_layers)",
        )
    return found
