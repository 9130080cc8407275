"""The eager reference: the worker's own weights, dense masks, plain cross-entropy, one worker at a time.

It is written apart from `step.py` and `loss.py`: blocks go through in groups (a block's result depends on the context
and itself only), so that neither attention scores nor logits of the real shapes ever exist at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trainer.anchors import Anchors, block_token_ids
from trainer.block_mask import dense_block_mask
from trainer.canary.witness import Named
from trainer.dflash_model import DFlashDrafter, DrafterConfig
from trainer.step import Batch, FrozenHead

_GROUP = 16


@dataclass(frozen=True)
class StepReference:
    """Of one worker's step, on the host in float64: hidden states and loss sum by micro-batch, the step's gradient."""

    hidden: list[Tensor]
    loss_sums: list[float]
    gradient: Named


class Eager:
    """Computes steps of one device's workers in `dtype`; holds the frozen weights in that dtype."""

    def __init__(self, config: DrafterConfig, frozen: FrozenHead, dtype: torch.dtype) -> None:
        self._config = config
        self._dtype = dtype
        self._embed = frozen.embed_weight.to(dtype)
        tied = frozen.head_weight is frozen.embed_weight
        self._head = self._embed if tied else frozen.head_weight.to(dtype)

    def step(self, weights: Named, batches: Sequence[Batch], normaliser: float) -> StepReference:
        """One step's forward-backwards from `weights`; the gradient is rounded once, to the dtype."""
        drafter = DFlashDrafter(self._config, device="meta", dtype=self._dtype)
        device = self._embed.device
        # copies of the worker's own weights: a reference that draws them again proves nothing
        copies = {name: each.to(device, self._dtype, copy=True) for name, each in weights.items()}
        drafter.load_state_dict(copies, assign=True)
        parameters = dict(drafter.requires_grad_(True).named_parameters())
        total = {name: torch.zeros_like(each, dtype=torch.float64) for name, each in parameters.items()}
        hidden, losses = [], []
        for batch in batches:
            groups, loss_sum = [], 0.0
            for start in range(0, batch.anchors.positions.shape[1], _GROUP):
                out, loss = self._group(drafter, batch, slice(start, start + _GROUP))
                gradients = torch.autograd.grad(loss * normaliser, list(parameters.values()))
                for name, gradient in zip(parameters, gradients, strict=True):
                    total[name] += gradient
                groups.append(out.detach().cpu())
                loss_sum += float(loss.detach())
            hidden.append(torch.cat(groups, dim=1))
            losses.append(loss_sum)
        return StepReference(hidden, losses, {name: each.to(self._dtype).cpu() for name, each in total.items()})

    def _group(self, drafter: DFlashDrafter, batch: Batch, part: slice) -> tuple[Tensor, Tensor]:
        """Hidden states [N, a * B, D] of a group of a blocks, and their weighted loss sum."""
        size, bucket = self._config.block_size, batch.input_ids.shape[1]
        anchors = Anchors(batch.anchors.positions[:, part], batch.anchors.keep[:, part])
        ids = block_token_ids(batch.input_ids, anchors, size, self._config.mask_token_id)
        mask = dense_block_mask(anchors, batch.lengths, bucket, size)
        block = nn.functional.embedding(ids, self._embed)
        hidden = drafter(block, batch.features.to(self._dtype), anchors.positions, mask)
        logits = nn.functional.linear(hidden, self._head)
        wide = logits.to(torch.promote_types(self._dtype, torch.float32))
        losses = nn.functional.cross_entropy(wide.flatten(0, 1), batch.labels[:, part].reshape(-1), reduction="none")
        weights = batch.weights[:, part].reshape(-1).to(wide.dtype)
        return hidden, (losses * weights).sum()


def sum_gradients(gradients: Sequence[Named], dtype: torch.dtype) -> Named:
    """What the exchange should give: the sum in worker order. Each is normalised by the weight of all already."""
    names = gradients[0]
    total = {name: gradients[0][name].to(dtype).clone() for name in names}
    for other in gradients[1:]:
        for name in names:
            total[name] += other[name].to(dtype)
    return total


@dataclass(frozen=True)
class AdamWRule:
    """AdamW with clipping as the papers have it, without torch.optim: decoupled decay, bias correction."""

    rate: float
    betas: tuple[float, float]
    weight_decay: float
    clip: float
    epsilon: float = 1e-8

    def train(self, start: Named, gradients: Sequence[Named], dtype: torch.dtype) -> Named:
        """Parameters after one update for each gradient, computed in `dtype` on the host."""
        values = {name: each.to(dtype, copy=True) for name, each in start.items()}
        first = {name: torch.zeros_like(each) for name, each in values.items()}
        second = {name: torch.zeros_like(each) for name, each in values.items()}
        beta1, beta2 = self.betas
        for step, gradient in enumerate(gradients, 1):
            wide = {name: each.to(dtype) for name, each in gradient.items()}
            norm = float(torch.stack([each.double().square().sum() for each in wide.values()]).sum().sqrt())
            scale = min(1.0, self.clip / (norm + 1e-6))
            for name, value in values.items():
                clipped = wide[name] * scale
                first[name].mul_(beta1).add_(clipped, alpha=1 - beta1)
                second[name].mul_(beta2).addcmul_(clipped, clipped, value=1 - beta2)
                root = (second[name] / (1 - beta2**step)).sqrt() + self.epsilon
                value.mul_(1 - self.rate * self.weight_decay)
                value.sub_(self.rate * (first[name] / (1 - beta1**step)) / root)
        return values
