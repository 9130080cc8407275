"""The optimiser: the last part of a training step. AdamW, clipped, with or without float32 master weights."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from trainer.errors import InputError

if TYPE_CHECKING:
    from trainer.fused_adamw import FusedAdamW

_MASTER = "master."
_STATE = ("exp_avg", "exp_avg_sq", "step")
_SAME_WORKLOAD = "resume with the workload of the checkpoint (dtype, draft_layers, master_weights)"
_EPSILON = 1e-8
_CLIP_EPSILON = 1e-6
_NARROW = (torch.bfloat16, torch.float16)


def learning_rate_at(step: int, *, steps: int, peak: float, warmup_ratio: float) -> float:
    """Learning rate of optimiser step `step` (from 0): linear warm-up, then a cosine to zero at `steps`."""
    warm = math.ceil(steps * warmup_ratio)
    if step < warm:
        return peak * (step + 1) / warm
    return peak * 0.5 * (1.0 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))


class ClippedAdamW:
    """AdamW over named parameters of one replica; the `compile.Optimizer` of the drafter's step.

    `rate` is a 0-dim float32 tensor on the parameters' device: a Python number would be frozen into a captured graph.
    With `masters`, the update of bfloat16 parameters happens in float32 copies, which then round into the parameters.
    Without, it happens in the parameters, with moments in their dtype: the arithmetic is float32's, what is kept is
    rounded, and of an update below half a rounding nothing is left. All state is allocated here, and stays where it is.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[str, nn.Parameter]],
        *,
        betas: tuple[float, float],
        weight_decay: float,
        clip: float,
        masters: bool = True,
    ) -> None:
        self._names = [name for name, _ in parameters]
        self._betas = betas
        self._weight_decay = weight_decay
        self._clip = clip
        own = [each.detach() for _, each in parameters]
        self._narrow = [each for each in own if masters and each.dtype in _NARROW]
        self._copied = [each.float() for each in self._narrow]
        copies = iter(self._copied)
        # what is updated: the masters, or the parameters themselves
        self._updated = [next(copies) if masters and each.dtype in _NARROW else each for each in own]
        device = own[0].device
        self._steps = torch.zeros(len(own), device=device)
        self._state = {
            "exp_avg": [torch.zeros_like(each) for each in self._updated],
            "exp_avg_sq": [torch.zeros_like(each) for each in self._updated],
            "step": list(self._steps.unbind()),
        }
        self._rate = torch.zeros((), device=device)
        self._fused = self._fused_update() if device.type == "cuda" and len({each.dtype for each in own}) == 1 else None

    @property
    def rate(self) -> Tensor:
        """The learning rate of the next step."""
        return self._rate

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor]) -> Tensor:
        """Clip, update, and return the gradient norm before clipping (0-dim); `gradients` stay as they are."""
        if self._fused is None:
            return self._plain_step(gradients)
        return self._fused.step(
            gradients,
            self._rate,
            betas=self._betas,
            decay=self._weight_decay,
            clip=self._clip,
            epsilon=_EPSILON,
            clip_epsilon=_CLIP_EPSILON,
        )

    def _fused_update(self) -> FusedAdamW:
        # triton is only where there is a GPU
        from trainer.fused_adamw import FusedAdamW

        state = self._state
        return FusedAdamW(self._updated, state["exp_avg"], state["exp_avg_sq"], self._narrow, self._steps)

    def _plain_step(self, gradients: Sequence[Tensor]) -> Tensor:
        clipped = [each.float() if each.dtype in _NARROW else each.clone() for each in gradients]
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(clipped)))
        torch._foreach_mul_(clipped, (self._clip / (norm + _CLIP_EPSILON)).clamp(max=1.0))
        adamw(
            self._updated,
            [each.to(mine.dtype) for each, mine in zip(clipped, self._updated, strict=True)],
            self._state["exp_avg"],
            self._state["exp_avg_sq"],
            [],
            self._state["step"],
            fused=True,
            amsgrad=False,
            beta1=self._betas[0],
            beta2=self._betas[1],
            lr=self._rate,
            weight_decay=self._weight_decay,
            eps=_EPSILON,
            maximize=False,
        )
        if self._narrow:
            torch._foreach_copy_(self._narrow, self._copied)
        return norm

    def tensors(self) -> list[Tensor]:
        """See `compile.Optimizer`."""
        return [*self._copied, *(each for state in self._state.values() for each in state)]

    def state_tensors(self) -> dict[str, Tensor]:
        """Everything that the next step depends on besides parameters and rate, by flat names."""
        copied = {id(each) for each in self._copied}
        state = {
            f"{_MASTER}{name}": each
            for name, each in zip(self._names, self._updated, strict=True)
            if id(each) in copied
        }
        for key in _STATE:
            state.update({f"{key}.{name}": each for name, each in zip(self._names, self._state[key], strict=True)})
        return state

    @torch.no_grad()
    def load_state_tensors(self, state: Mapping[str, Tensor]) -> None:
        """Continue from `state_tensors` of another process. Raises `InputError` where it does not fit."""
        left = dict(state)
        for name, mine in self.state_tensors().items():
            mine.copy_(_take(left, name, mine))
        if left:
            raise InputError(
                f"the optimiser's state has {sorted(left)[0]!r}, which this drafter has not",
                "training.resume_from",
                _SAME_WORKLOAD,
            )


def _take(state: dict[str, Tensor], name: str, like: Tensor) -> Tensor:
    found = state.pop(name, None)
    if found is None or found.shape != like.shape:
        raise InputError(
            f"the optimiser's state has no {name!r} of shape {tuple(like.shape)}",
            "training.resume_from",
            _SAME_WORKLOAD,
        )
    return found


def refuse_other_masters(names: Collection[str], masters: bool) -> None:
    """A checkpoint with float32 master weights goes on with them, one without goes on without. Raises `InputError`.

    `names`: of its `state_tensors`; before the first step it has none, and goes on either way.
    """
    found = any(name.startswith(_MASTER) for name in names)
    if found == masters or not any(name.startswith(_STATE) for name in names):
        return
    with_or_without = {True: "with", False: "without"}
    raise InputError(
        f"the checkpoint is of a run {with_or_without[found]} float32 master weights, this one trains "
        f"{with_or_without[masters]} them",
        "training.resume_from",
        f"{_SAME_WORKLOAD}, or begin anew with its weights (init_from)",
    )
