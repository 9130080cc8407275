"""The eager reference: the workers' own weights, dense masks, plain cross-entropy, one worker at a time.

It is written apart from `step.py` and `loss.py`: blocks go through in groups (a block's result depends on the context
and itself only), so that neither attention scores nor logits of the real shapes ever exist at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trainer.anchors import Anchors, block_token_ids
from trainer.block_mask import dense_block_masks
from trainer.canary.witness import Named
from trainer.dflash_model import DFlashDrafter, DrafterConfig
from trainer.fp8 import SHARE, quantised
from trainer.loss import DPACE
from trainer.step import Batch, FrozenHead

GROUP = 16


@dataclass(frozen=True)
class Order:
    """How blocks are grouped, and which group comes first: another order is another, equally right, rounding.

    `nudge`: not 0, inputs are off by a rounding up or down, drawn from it: what lies on the edge between two 8-bit
    numbers may then become the other one, as it may in other right code.
    """

    group: int = GROUP
    backwards: bool = False
    nudge: int = 0

    def parts(self, slots: int) -> list[slice]:
        """The groups of `slots` anchor slots, in the order in which they are computed."""
        found = [slice(start, min(start + self.group, slots)) for start in range(0, slots, self.group)]
        return found[::-1] if self.backwards else found


@dataclass(frozen=True)
class StepReference:
    """Of one worker's step, on its device: hidden states and loss sum by micro-batch, the step's gradient.

    The gradient is as wide as it was summed up: float64 of float64, else float32.
    """

    hidden: list[Tensor]
    loss_sums: list[float]
    gradient: Named


class Eager:
    """Computes steps of one device's workers in `dtype`.

    On the device, in bytes a parameter: the weights (8 in float64), the gradient's sum (8, else 4), and for a moment
    the gradient of one parameter; besides them the head in `dtype` and one group's activations.
    """

    def __init__(
        self, config: DrafterConfig, frozen: FrozenHead, dtype: torch.dtype, loss_type: str, *, narrow: bool = False
    ) -> None:
        """`narrow`: the arithmetic of `fp8`, whose 8-bit numbers are then multiplied in `dtype` as well."""
        self._config = config
        self._narrow = narrow
        self._loss_type = loss_type
        self._dtype = dtype
        self._embed = frozen.embed_weight
        self._head = (_narrow_head(frozen.head_weight) if narrow else frozen.head_weight).to(dtype)

    def step(
        self, weights: Named, batches: Sequence[Batch], normaliser: float, order: Order | None = None
    ) -> StepReference:
        """One step's forward-backwards from `weights`, which may be the wider master copies."""
        drafter = DFlashDrafter(self._config, device="meta", dtype=self._dtype, narrow=self._narrow)
        device, rounded = self._embed.device, self._embed.dtype
        # copies of the workers' own weights: a reference that draws them again proves nothing
        copies = {name: each.to(device, rounded).to(self._dtype, copy=True) for name, each in weights.items()}
        drafter.load_state_dict(copies, assign=True)
        parameters = dict(drafter.requires_grad_(True).named_parameters())
        wide = torch.promote_types(self._dtype, torch.float32)
        total = {name: torch.zeros_like(each, dtype=wide) for name, each in parameters.items()}
        for name, each in parameters.items():
            each.register_post_accumulate_grad_hook(_adds_to(total[name]))
        hidden, losses = [], []
        for batch in batches:
            found: dict[int, Tensor] = {}
            loss_sum = 0.0
            for part in (order or Order()).parts(batch.anchors.positions.shape[1]):
                out, loss = self._group(drafter, batch, part, order or Order())
                # into the hooks, one parameter at a time: two whole gradients never exist at once
                (loss * normaliser).backward()
                found[part.start] = out.detach()
                loss_sum += float(loss.detach())
            hidden.append(torch.cat([found[start] for start in sorted(found)], dim=1))
            losses.append(loss_sum)
        return StepReference(hidden, losses, total)

    def _group(self, drafter: DFlashDrafter, batch: Batch, part: slice, order: Order) -> tuple[Tensor, Tensor]:
        """Hidden states [N, a * (B - 1), D] of a group of a blocks, and their weighted loss sum."""
        size, bucket = self._config.block_size, batch.input_ids.shape[1]
        anchors = Anchors(batch.anchors.positions[:, part], batch.anchors.keep[:, part])
        ids = block_token_ids(batch.input_ids, anchors, size, self._config.mask_token_id)
        masks = dense_block_masks(self._config, anchors, batch.lengths, bucket)
        block = _nudged(nn.functional.embedding(ids, self._embed).to(self._dtype), order.nudge)
        features = _nudged(batch.features.to(self._dtype), order.nudge)
        hidden = states = drafter(block, features, anchors.positions, *masks)
        if self._narrow:
            # the quantisation counts as the identity
            numbers, scale = quantised(hidden)
            states = hidden + ((numbers.to(self._dtype) * scale.to(self._dtype)) - hidden).detach()
        logits = nn.functional.linear(states, self._head)
        wide = logits.to(torch.promote_types(self._dtype, torch.float32))
        labels, weights = batch.labels[:, part, 1:], batch.weights[:, part, 1:].reshape(-1).to(wide.dtype)
        losses = nn.functional.cross_entropy(wide.flatten(0, 1), labels.reshape(-1), reduction="none")
        if self._loss_type == DPACE:
            weights = _dpace(losses.detach().view(-1, size - 1), weights.view(-1, size - 1) > 0).flatten()
        total = (losses * weights).sum()
        if self._narrow:
            total = _narrow_gradient(wide.flatten(0, 1), labels.reshape(-1), weights, total)
        return hidden, total


def _narrow_head(weight: Tensor) -> Tensor:
    """What the 8-bit numbers of a head stand for, one scale for all of them; float32."""
    scale = weight.detach().abs().amax().float() / torch.finfo(torch.float8_e4m3fn).max
    return (weight.detach().float() / scale).to(torch.float8_e4m3fn).float() * scale


def _narrow_gradient(logits: Tensor, labels: Tensor, weights: Tensor, total: Tensor) -> Tensor:
    """`total` with the gradient of `fp8`: probabilities are e5m2, but for the labels'."""
    log_shares = logits.detach().log_softmax(dim=-1)
    shares = (log_shares.exp().float() * SHARE).to(torch.float8_e5m2).to(logits.dtype) / SHARE
    at = labels[:, None]
    error = shares.scatter(1, at, torch.expm1(log_shares.gather(1, at)))
    tie = (logits * error * weights[:, None]).sum()
    return total.detach() + tie - tie.detach()


def _nudged(inputs: Tensor, seed: int) -> Tensor:
    if not seed:
        return inputs
    # the same for each group: it is one computation
    generator = torch.Generator().manual_seed(seed)
    up = torch.rand(inputs.shape, generator=generator).to(inputs.device) < 0.5
    step = torch.finfo(inputs.dtype).eps
    return inputs * torch.where(up, 1.0 + step, 1.0 - step).to(inputs.dtype)


def _dpace(losses: Tensor, counts: Tensor) -> Tensor:
    """The weights of `loss.dpace_weights`, term by term; [blocks, B - 1], without the anchors' slots."""
    weights = torch.zeros_like(losses)
    reach = torch.ones_like(losses[:, 0])
    for last in range(losses.shape[1]):
        here = counts[:, last]
        reach = torch.where(here, reach * (0.5 + 0.5 * torch.exp(-losses[:, last])), reach)
        # this term is in the weight of every slot up to here
        weights[:, : last + 1] += torch.where(here, reach, torch.zeros_like(reach))[:, None]
    return weights * counts


class _adds_to:  # noqa: N801 -- reads as a verb
    """A parameter's hook: moves its new gradient into `total`."""

    def __init__(self, total: Tensor) -> None:
        self._total = total

    def __call__(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self._total += parameter.grad
        parameter.grad = None
