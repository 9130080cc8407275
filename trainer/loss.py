"""The drafter's loss: weighted cross-entropy over block slots, fused with the frozen head.

Slots are weighted by a fixed decay (the DFlash paper's), or by D-PACE, from the drafter's own confidence.

Full logits of a Qwen3-8B-shaped sample (7,680 rows, 151,936 words) are 4.7 GB in float32. They never exist
here: rows go through the head in chunks, and each chunk's gradient is taken in the forward pass.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.anchors import Anchors
from trainer.fp8 import NarrowHead, shares_of

# (block size, gamma) of the paper: arXiv:2602.06036, section 4.2 and appendix A.1
_GAMMAS = ((8, 4.0), (10, 5.0), (16, 7.0))
DFLASH, DPACE = "dflash", "dpace"
"""Loss types, by SpecForge's names."""
_DPACE_ALPHA = 0.5


def decay_gamma(block_size: int) -> float:
    """The decay of slot weights, in slots: 4 at block size 8, 5 at 10, 7 at 16 as in the paper.

    Linear between those; outside, the nearest piece goes on (block_size / 2 below, 1/3 a slot above).
    """
    if block_size < 2:
        raise ValueError(f"block_size is {block_size}: at least 2 is needed")
    pieces = list(itertools.pairwise(_GAMMAS))
    (x0, y0), (x1, y1) = next((piece for piece in pieces if block_size <= piece[1][0]), pieces[-1])
    return y0 + (block_size - x0) * (y1 - y0) / (x1 - x0)


def slot_decay(loss_type: str, block_size: int, gamma: float | None) -> float:
    """The gamma of a batch's weights; None: by block size.

    Under D-PACE it is infinite: a slot that counts weighs 1, and the step makes its weight from the drafter's numbers.
    """
    if loss_type == DPACE:
        return math.inf
    return decay_gamma(block_size) if gamma is None else gamma


def block_labels(  # noqa: PLR0917 -- six tensors and numbers that belong together
    input_ids: Tensor, loss_mask: Tensor, lengths: Tensor, anchors: Anchors, block_size: int, gamma: float
) -> tuple[Tensor, Tensor]:
    """What every slot should say and how much it counts: labels long [N, A, B], weights float32 [N, A, B].

    Same-position alignment: slot k's label is token anchor + k. Its weight is exp(-(k - 1) / gamma), times 0
    for slot 0 (the anchor itself), padding slots, positions past the row's length and unsupervised tokens.
    `input_ids` long [N, S], `loss_mask` bool [N, S], `lengths` long [N].
    """
    rows, count = anchors.positions.shape
    slot = torch.arange(block_size, device=input_ids.device)
    position = anchors.positions[:, :, None] + slot
    index = position.clamp(max=input_ids.shape[1] - 1).view(rows, count * block_size)
    labels = input_ids.gather(1, index).view(rows, count, block_size)
    supervised = loss_mask.bool().gather(1, index).view(rows, count, block_size)
    counts = anchors.keep[:, :, None] & (position < lengths[:, None, None]) & supervised & (slot > 0)
    decay = torch.exp(-(slot - 1).to(torch.float32) / gamma)
    return labels, torch.where(counts, decay, torch.zeros_like(decay))


@dataclass(frozen=True)
class BlockLoss:
    """Sums over one batch, each a 0-dim float32 tensor; only `loss_sum` carries a gradient.

    `loss_sum`: sum of weight x cross-entropy, in nats; `weight_sum`: sum of the weights. Their quotient is the
    loss that is shown, but it is taken outside, over all workers: a worker's own quotient would make the update
    depend on how samples fell to workers. `first_slot_correct` of `first_slot_count`: slots 1 that count
    and whose most likely token is the label.
    """

    loss_sum: Tensor
    weight_sum: Tensor
    first_slot_correct: Tensor
    first_slot_count: Tensor


def dpace_weights(neg_log: Tensor, counts: Tensor) -> Tensor:
    """D-PACE's slot weights (arXiv:2605.18810), [blocks, B - 1], of the slots behind the anchor.

    `neg_log`: -log of the drafter's probability of each label; `counts`: which slots count. With q = exp(-neg_log) and
    q' = (1 - alpha) q + alpha, alpha = 0.5, slot j weighs the sum over m >= j of the product of q'_1 .. q'_m: how much
    of the accepted length hangs on it. A slot that does not count is no factor, no term, and weighs 0 (as in SpecForge
    a6b6b023 and speculators c05b95b3). Without gradient.
    """
    with torch.no_grad():
        smooth = (1 - _DPACE_ALPHA) * torch.exp(-neg_log) + _DPACE_ALPHA
        reach = torch.where(counts, smooth, 1.0).cumprod(dim=1)
        terms = torch.where(counts, reach, 0.0)
        return torch.where(counts, terms.flip(1).cumsum(dim=1).flip(1), 0.0)


def block_loss(  # noqa: PLR0917 -- as above
    hidden: Tensor,
    head: Tensor | NarrowHead,
    labels: Tensor,
    weights: Tensor,
    chunk: int = 1024,
    loss_type: str = DFLASH,
) -> BlockLoss:
    """Cross-entropy of the drafter's output `hidden` [N, A * (B - 1), D] through the frozen `head` [V, D].

    `labels` and `weights` are `block_labels`'s; with loss type "dpace" `weights` only say which slots count. Slot 0 has
    no hidden state. At most `chunk` rows of logits exist at a time. Products are in the tensors' dtype, softmax in
    float32 (float64 for float64). `hidden` and `head` must have one dtype: casting the head here would copy it
    at every step. With a `NarrowHead` the products are of 8-bit floats.
    """
    if isinstance(head, Tensor) and hidden.dtype != head.dtype:
        raise ValueError(f"hidden is {hidden.dtype}, the head {head.dtype}: cast the head once, before training")
    blocks, size = labels.shape[0] * labels.shape[1], labels.shape[2]
    # slot by slot, so that the first `blocks` rows are the slots 1
    by_slot = hidden.reshape(blocks, size - 1, hidden.shape[-1]).transpose(0, 1)
    rows = by_slot.reshape(blocks * (size - 1), hidden.shape[-1])
    flat_labels = labels.reshape(blocks, size)[:, 1:].t().reshape(-1)
    counts = weights.reshape(blocks, size)[:, 1:] > 0
    wants_gradient = torch.is_grad_enabled() and hidden.requires_grad
    with torch.no_grad():
        neg_log, correct, gradient = _head_pass(
            rows, head, flat_labels, counts[:, 0], chunk=chunk, with_gradient=wants_gradient
        )
    if loss_type == DPACE:
        by_block = dpace_weights(neg_log.view(size - 1, blocks).t(), counts)
    else:
        by_block = weights.reshape(blocks, size)[:, 1:]
    flat_weights = by_block.t().reshape(-1).to(neg_log.dtype)
    loss_sum = (flat_weights * neg_log).sum().to(torch.float32)
    if wants_gradient:
        # Ties the gradient to the rows: adds x - x, whose derivative is `gradient`. An autograd.Function would say it
        # plainly, but torch 2.11 compiled this loss, written as one, to gradients that were all zero, without a word.
        # In float32, since the caller's scale (1 / weights) rounded to bfloat16 would bend the whole gradient.
        by_row = (rows.to(neg_log.dtype) * gradient).sum(dim=1)
        tie = (by_row * flat_weights).sum()
        loss_sum = loss_sum + (tie - tie.detach()).to(torch.float32)
    return BlockLoss(
        loss_sum=loss_sum,
        weight_sum=flat_weights.sum().to(torch.float32),
        first_slot_correct=correct,
        first_slot_count=counts[:, 0].sum().to(torch.float32),
    )


def _head_pass(
    rows: Tensor,
    head: Tensor | NarrowHead,
    labels: Tensor,
    first_counts: Tensor,
    *,
    chunk: int,
    with_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """-log p(label) of each row, and its gradient by the row if wanted (else empty), neither weighted.

    Between them: right answers among the first rows, of those that `first_counts` has.
    """
    first_rows = first_counts.shape[0]
    correct = torch.zeros((), dtype=torch.float32, device=rows.device)
    gradients, losses = [], []
    for start in range(0, rows.shape[0], chunk):
        part = slice(start, start + chunk)
        firsts = max(0, min(first_rows - start, rows[part].shape[0]))
        loss, hits, gradient = _chunk(rows[part], head, labels[part], firsts, with_gradient=with_gradient)
        losses.append(loss)
        gradients.append(gradient)
        if firsts:
            correct = correct + (hits & first_counts[part][:firsts]).sum()
    return torch.cat(losses), correct, torch.cat(gradients) if with_gradient else rows.new_empty(0)


def _chunk(
    rows: Tensor, head: Tensor | NarrowHead, labels: Tensor, firsts: int, *, with_gradient: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """-log p(label) of each row, which of the first rows are right, and the gradient by the row if wanted."""
    if isinstance(head, Tensor):
        logits = torch.mm(rows, head.t())
        loss, hits, error = _row_losses(logits, labels, firsts, with_gradient=with_gradient)
        return loss, hits, torch.mm(error, head) if with_gradient else error
    loss, hits, shares = _narrow_losses(head.logits(rows), labels, firsts, with_gradient=with_gradient)
    return loss, hits, head.gradient(shares, loss, labels, rows.dtype) if with_gradient else shares


def _narrow_losses(
    logits: Tensor, labels: Tensor, firsts: int, *, with_gradient: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """As `_row_losses`, but the third is the `shares_of` the logits."""
    if not with_gradient:
        return _row_losses(logits, labels, firsts, with_gradient=False)
    if _fused(logits):
        from trainer.fused_cross_entropy import cross_entropy_shares

        return cross_entropy_shares(logits, labels, firsts)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    log_sum = wide.logsumexp(dim=1)
    losses = log_sum - wide.gather(1, labels[:, None])[:, 0]
    return losses, wide[:firsts].argmax(dim=1) == labels[:firsts], shares_of(wide, log_sum, labels)


def _row_losses(logits: Tensor, labels: Tensor, firsts: int, *, with_gradient: bool) -> tuple[Tensor, Tensor, Tensor]:
    """-log p(label) of each row, which of the first rows are right, and the gradient by the logits in their dtype.

    The logits are used up; without `with_gradient` the last of the three means nothing.
    """
    if _fused(logits):
        # triton is only where there is a GPU
        from trainer.fused_cross_entropy import cross_entropy_

        losses, hits = cross_entropy_(logits, labels, firsts, with_gradient)
        return losses, hits, logits
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    log_sum = wide.logsumexp(dim=1)
    losses = log_sum - wide.gather(1, labels[:, None])[:, 0]
    hits = wide[:firsts].argmax(dim=1) == labels[:firsts]
    if not with_gradient:
        return losses, hits, logits
    # p - 1 at the label is taken before rounding: after it, a confident row would lose all digits
    at_label = torch.arange(logits.shape[1], device=logits.device) == labels[:, None]
    error = (wide - log_sum[:, None]).exp() - at_label.to(wide.dtype)
    return losses, hits, error.to(logits.dtype)


def _fused(logits: Tensor) -> bool:
    return logits.is_cuda and logits.dtype != torch.float64
