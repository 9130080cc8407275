"""Anchors: the clean tokens from which blocks are drafted, sampled anew for every sequence."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Anchors:
    """`positions`: long [N, A], ascending in each row; `keep`: bool [N, A], False in slots that are padding.

    A padding slot repeats the row's last valid position (0 in a row that has none).
    """

    positions: Tensor
    keep: Tensor


@dataclass(frozen=True)
class AnchorRule:
    """Which positions may be anchors: supervised ones that `room` more tokens of the row follow.

    One of the next `horizon` tokens must be supervised as well: a block without a label would have no loss, and a step
    of such blocks no normaliser.
    """

    room: int
    horizon: int

    def __str__(self) -> str:
        follow = "token follows" if self.room == 1 else "tokens follow"
        near = "the next one" if self.horizon == 1 else f"one of the next {self.horizon}"
        return f"supervised, {self.room} {follow} it, {near} supervised"


SPECFORGE = AnchorRule(room=1, horizon=1)


def anchor_rule(name: str, block_size: int) -> AnchorRule:
    """The rule of a public trainer, by its name; `block_size` counts the anchor.

    `specforge` (a6b6b023): a and a + 1 are supervised; the block may hang over the row's end, where its weight is 0.
    `torchspec` (6f21829c): a is supervised and the whole block lies in the row, a <= length - B: answers that are
    shorter than a block are never trained on. `speculators` (c05b95b3): the row's last B positions are no anchors,
    one more than that. Both take S, a padded or packed row, for the length; here it is the row's own.
    """
    rules = {
        "specforge": SPECFORGE,
        "torchspec": AnchorRule(room=block_size - 1, horizon=block_size - 1),
        "speculators": AnchorRule(room=block_size, horizon=block_size - 1),
    }
    return rules[name]


def eligible_anchors(loss_mask: Tensor, lengths: Tensor, rule: AnchorRule = SPECFORGE) -> Tensor:
    """Positions that may be anchors: bool [N, S] from `loss_mask` bool [N, S] and `lengths` long [N]."""
    size = loss_mask.shape[1]
    position = torch.arange(size, device=loss_mask.device)
    ends = lengths.to(loss_mask.device)[:, None]
    supervised = loss_mask.bool() & (position < ends)
    # how many supervised tokens lie before each position, and behind the last
    before = torch.nn.functional.pad(supervised.long().cumsum(dim=1), (1, 0))
    labels = before[:, (position + 1 + rule.horizon).clamp(max=size)] - before[:, position + 1]
    return supervised & (labels > 0) & (position + rule.room < ends)


def sample_anchors(
    loss_mask: Tensor, lengths: Tensor, count: int, generator: torch.Generator, rule: AnchorRule = SPECFORGE
) -> Anchors:
    """Sample `count` anchors a row, uniformly and without replacement, from the eligible positions.

    The shape is always [N, count], so that nothing recompiles: unused slots are padding (`Anchors`). A row
    with no eligible position has all keep False and positions 0. The numbers come from `generator` (a CPU
    generator) whatever the device of `loss_mask`, so that the same seed gives the same anchors anywhere.
    """
    if count < 1:
        raise ValueError(f"anchors: {count} slots a sequence, at least 1 is needed")
    rows, length = loss_mask.shape
    eligible = eligible_anchors(loss_mask, lengths, rule)
    # float64: ties between keys are then too rare for top-k's order of ties to differ between devices
    keys = torch.rand((rows, length), generator=generator, dtype=torch.float64).to(loss_mask.device)
    best, where = keys.masked_fill(~eligible, -1.0).topk(min(count, length), dim=1)
    # padding sorts behind every real position
    positions = where.masked_fill(best < 0, length).sort(dim=1).values
    if count > length:
        positions = torch.nn.functional.pad(positions, (0, count - length), value=length)
    keep = positions < length
    last = positions.masked_fill(~keep, 0).amax(dim=1, keepdim=True)
    return Anchors(positions=torch.where(keep, positions, last), keep=keep)


def block_token_ids(input_ids: Tensor, anchors: Anchors, block_size: int, mask_token_id: int) -> Tensor:
    """The drafter's input: [anchor, mask, ..., mask] for every slot, long [N, A * block_size]."""
    rows, count = anchors.positions.shape
    ids = input_ids.new_full((rows, count, block_size), mask_token_id)
    ids[:, :, 0] = input_ids.gather(1, anchors.positions)
    return ids.view(rows, count * block_size)
