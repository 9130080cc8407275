"""Acceptance of a drafter over greedy texts of its target, all anchors of a text at once.

Greedy speculative decoding gives the target's own greedy text, so what a cycle accepts at an anchor is known from that
text: the longest prefix of the block's proposals that stands there. Exactly what `trainer.decode` counts where the
arithmetic of both ways agrees (float32: `gpu_quality.py` compares them), in a fraction of its time.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from trainer.anchors import Anchors, block_token_ids
from trainer.block_mask import dense_block_masks
from trainer.data import HeldOut, collate_held_out
from trainer.dflash_model import DFlashDrafter
from trainer.step import FrozenHead
from trainer.target import Target

_ROWS = 8


@dataclass(frozen=True)
class Acceptance:
    """`tau`: mean over `cycles` of accepted + 1. `by_position[k - 1]`: share of cycles that accepted slot k."""

    tau: float
    by_position: tuple[float, ...]
    cycles: int


def acceptance(
    target: Target,
    drafter: DFlashDrafter,
    frozen: FrozenHead,
    texts: Sequence[HeldOut],
    ends: Collection[int],
    *,
    block_size: int,
    shuffled: bool = False,
) -> Acceptance:
    """Over all of `texts`, in blocks of `block_size` (the trained one or less).

    `shuffled`: the drafter gets the target's states of other positions, a control. Raises ValueError without a cycle.
    """
    accepted = [
        count for text in cycles_of(target, drafter, frozen, texts, ends, block_size, shuffled) for count in text
    ]
    if not accepted:
        raise ValueError(f"no text is longer than a block of {block_size}")
    by_position = tuple(sum(each >= slot for each in accepted) / len(accepted) for slot in range(1, block_size))
    return Acceptance(sum(accepted) / len(accepted) + 1, by_position, len(accepted))


@torch.no_grad()
def cycles_of(  # noqa: PLR0917 -- as above
    target: Target,
    drafter: DFlashDrafter,
    frozen: FrozenHead,
    texts: Sequence[HeldOut],
    ends: Collection[int],
    block_size: int,
    shuffled: bool = False,
) -> list[list[int]]:
    """Accepted proposals of each cycle of each text, as `trainer.decode` would count them.

    The last cycle of a text without an end token is left out where its block reaches beyond what is known.
    """
    smaller = DFlashDrafter(
        replace(drafter.config, block_size=block_size), device="meta", dtype=frozen.embed_weight.dtype
    )
    smaller.load_state_dict(drafter.state_dict(), assign=True)
    found = []
    for start in range(0, len(texts), _ROWS):
        part = texts[start : start + _ROWS]
        matched = _matched(target, smaller, frozen, part, shuffled)
        found += [_walk(text, row, ends, block_size) for text, row in zip(part, matched, strict=True)]
    return found


def _matched(
    target: Target, drafter: DFlashDrafter, frozen: FrozenHead, texts: Sequence[HeldOut], shuffled: bool
) -> list[list[int]]:
    """For each text, for each of its anchors from the first new token on: how many proposals stand in the text."""
    size, device = drafter.config.block_size, frozen.embed_weight.device
    longest = max(len(each.prompt) + len(each.answer) for each in texts)
    rows = collate_held_out(texts, longest, 0)
    features = target.features(rows.input_ids.to(target.device), rows.lengths).to(device, frozen.embed_weight.dtype)
    if shuffled:
        order = torch.randperm(longest, generator=torch.Generator().manual_seed(0))
        features = features[:, order.to(device)]
    first = torch.tensor([len(each.prompt) for each in texts])
    slots = max(len(each.answer) for each in texts)
    positions = first[:, None] + torch.arange(slots)
    keep = positions < rows.lengths[:, None]
    anchors = Anchors(torch.minimum(positions, rows.lengths[:, None] - 1).to(device), keep.to(device))
    ids = rows.input_ids.to(device)
    lengths = rows.lengths.to(device)
    block = nn.functional.embedding(
        block_token_ids(ids, anchors, size, drafter.config.mask_token_id), frozen.embed_weight
    )
    masks = dense_block_masks(drafter.config, anchors, lengths, longest)
    hidden = drafter(block, features, anchors.positions, *masks).unflatten(1, (slots, size - 1))
    # a row's logits at a time: all of them together would be gigabytes
    proposals = torch.stack([(row @ frozen.head_weight.t()).argmax(dim=-1) for row in hidden])
    index = anchors.positions[:, :, None] + torch.arange(1, size, device=device)
    inside = index < lengths[:, None, None]
    there = ids.gather(1, index.clamp(max=longest - 1).flatten(1)).view_as(index)
    same = (proposals == there) & inside
    return same.long().cumprod(dim=-1).sum(dim=-1).tolist()


def _walk(text: HeldOut, matched: Sequence[int], ends: Collection[int], block_size: int) -> list[int]:
    """From cycle to cycle through a text: each begins behind the bonus token of the one before."""
    last = len(text.answer) - 1
    ended = text.answer[last] in ends
    found, anchor = [], 0
    while anchor < last and (ended or anchor + block_size - 1 <= last):
        found.append(matched[anchor])
        anchor += matched[anchor] + 1
    return found


def frozen_of(target: Target, dtype: torch.dtype) -> FrozenHead:
    """The target's embedding and head in `dtype`."""

    def cast(weight: Tensor) -> Tensor:
        return weight.to(dtype)

    return FrozenHead(cast(target.embed_weight), cast(target.head_weight))
