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


def eligible_anchors(loss_mask: Tensor, lengths: Tensor) -> Tensor:
    """Positions that may be anchors: bool [N, S] from `loss_mask` bool [N, S] and `lengths` long [N].

    a is eligible when a and a + 1 are both supervised and a <= length - 2: there is at least one token to
    predict. The block may overhang the row; what hangs over has weight 0. This is SpecForge's rule
    (a6b6b023); TorchSpec asks for a <= S - block_size, which would starve short answers.
    """
    position = torch.arange(loss_mask.shape[1], device=loss_mask.device)
    supervised = loss_mask.bool()
    following = torch.zeros_like(supervised)
    following[:, :-1] = supervised[:, 1:]
    return supervised & following & (position <= lengths.to(loss_mask.device)[:, None] - 2)


def sample_anchors(loss_mask: Tensor, lengths: Tensor, count: int, generator: torch.Generator) -> Anchors:
    """Sample `count` anchors a row, uniformly and without replacement, from the eligible positions.

    The shape is always [N, count], so that nothing recompiles: unused slots are padding (`Anchors`). A row
    with no eligible position has all keep False and positions 0. The numbers come from `generator` (a CPU
    generator) whatever the device of `loss_mask`, so that the same seed gives the same anchors anywhere.
    """
    if count < 1:
        raise ValueError(f"anchors: {count} slots a sequence, at least 1 is needed")
    rows, length = loss_mask.shape
    eligible = eligible_anchors(loss_mask, lengths)
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
