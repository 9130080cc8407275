"""Who sees whom in training: the four rules of DFlash's attention mask, dense (SDPA) and for our own kernels.

Keys are [context S | block 0 | ... | block A-1], queries are the blocks only:

1. a block sees the context strictly before its anchor (the target's state at the anchor does not exist yet
   when the block is drafted);
2. it sees the whole of itself, both ways;
3. it sees no other block;
4. a padding slot sees no context but does see itself, so that no row is empty (an empty row is NaN).

The same rules are in SpecForge, TorchSpec and NeMo AutoModel; rule 4 is AutoModel's form of it. A sliding layer sees
less by rules 1 and 2, as its `drafter_config.SlidingWindow` says.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from trainer.anchors import Anchors
from trainer.drafter_config import DrafterConfig, SlidingWindow


class BlockRanges(NamedTuple):
    """A mask as the kernels of `block_attention` read it.

    The context of a query is its keys start .. end - 1: `starts` and `ends` int32 [N, A * B], contiguous; what lies
    outside the context does not count. Of its own block it sees all, or where `causal` all up to itself.
    """

    starts: Tensor
    ends: Tensor
    block_size: int
    causal: bool


def context_limits(anchors: Anchors, lengths: Tensor) -> Tensor:
    """How much context each slot sees: long [N, A]; its keys are 0 .. limit - 1. 0 for padding."""
    limits = torch.minimum(anchors.positions, lengths.to(anchors.positions.device)[:, None])
    return limits.masked_fill(~anchors.keep, 0)


def dense_block_mask(
    anchors: Anchors, lengths: Tensor, seq_len: int, block_size: int, window: SlidingWindow | None = None
) -> Tensor:
    """The mask for SDPA: bool [N, 1, A * B, S + A * B], True where a query may look."""
    return dense_mask_of(context_limits(anchors, lengths), seq_len, block_size, window)


def dense_block_masks(config: DrafterConfig, anchors: Anchors, lengths: Tensor, seq_len: int) -> tuple[Tensor, ...]:
    """What a drafter's forward takes: one dense mask for each of `config.attention_types`."""
    return tuple(
        dense_block_mask(anchors, lengths, seq_len, config.block_size, config.window_of(kind))
        for kind in config.attention_types
    )


def dense_mask_of(limits: Tensor, seq_len: int, block_size: int, window: SlidingWindow | None = None) -> Tensor:
    """The same from `context_limits`."""
    starts, ends = context_ranges(limits, block_size, window)
    position = torch.arange(seq_len, device=limits.device)
    context = (position >= starts[:, :, None]) & (position < ends[:, :, None])
    query = torch.arange(ends.shape[1], device=limits.device)
    own = query[:, None] // block_size == query // block_size
    if window is not None and window.causal:
        own = own & (query[:, None] >= query)
    return torch.cat([context, own.expand(limits.shape[0], -1, -1)], dim=2)[:, None]


def context_ranges(limits: Tensor, block_size: int, window: SlidingWindow | None) -> tuple[Tensor, Tensor]:
    """The context of every query, from `context_limits`: its keys are start .. end - 1, long [N, A * B] each."""
    ends = limits[:, :, None].expand(-1, -1, block_size)
    if window is None:
        starts = torch.zeros_like(ends)
    else:
        # a limit is the anchor, or 0 for padding, whose range is empty whatever its start
        starts = ends - window.reach + window.step * torch.arange(block_size, device=limits.device)
    return starts.flatten(1), ends.flatten(1)


def block_ranges(limits: Tensor, block_size: int, window: SlidingWindow | None = None) -> BlockRanges:
    """The same rules for the kernels, from `context_limits`: no value comes to the host."""
    starts, ends = context_ranges(limits, block_size, window)
    narrow = [each.to(torch.int32, memory_format=torch.contiguous_format) for each in (starts, ends)]
    return BlockRanges(narrow[0], narrow[1], block_size, window is not None and window.causal)
