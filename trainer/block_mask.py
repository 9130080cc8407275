"""Who sees whom in training: the four rules of DFlash's attention mask, dense (SDPA) and for flex attention.

Keys are [context S | block 0 | ... | block A-1], queries are the blocks only:

1. a block sees the context strictly before its anchor (the target's state at the anchor does not exist yet
   when the block is drafted);
2. it sees the whole of itself, both ways;
3. it sees no other block;
4. a padding slot sees no context but does see itself, so that no row is empty (an empty row is NaN).

The same rules are in SpecForge, TorchSpec and NeMo AutoModel; rule 4 is AutoModel's form of it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from trainer.anchors import Anchors

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def context_limits(anchors: Anchors, lengths: Tensor) -> Tensor:
    """How much context each slot sees: long [N, A]; its keys are 0 .. limit - 1. 0 for padding."""
    limits = torch.minimum(anchors.positions, lengths.to(anchors.positions.device)[:, None])
    return limits.masked_fill(~anchors.keep, 0)


def dense_block_mask(anchors: Anchors, lengths: Tensor, seq_len: int, block_size: int) -> Tensor:
    """The mask for SDPA: bool [N, 1, A * B, S + A * B], True where a query may look."""
    return dense_mask_of(context_limits(anchors, lengths), seq_len, block_size)


def dense_mask_of(limits: Tensor, seq_len: int, block_size: int) -> Tensor:
    """The same from `context_limits`."""
    limits = limits.repeat_interleave(block_size, dim=1)
    position = torch.arange(seq_len, device=limits.device)
    context = position < limits[:, :, None]
    slot = torch.arange(limits.shape[1], device=limits.device) // block_size
    own = (slot[:, None] == slot).expand(limits.shape[0], -1, -1)
    return torch.cat([context, own], dim=2)[:, None]


def block_mask_mod(limits: Tensor, seq_len: int, block_size: int) -> MaskMod:
    """The same rules as a flex attention `mask_mod(batch, head, query, key)`, of `context_limits`."""

    def mask_mod(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        slot = query // block_size
        own = (key >= seq_len) & ((key - seq_len) // block_size == slot)
        return (key < limits[batch, slot]) | own

    return mask_mod


def flex_block_mask(anchors: Anchors, lengths: Tensor, seq_len: int, block_size: int) -> BlockMask:
    """The mask for flex attention, on the anchors' device; build it outside a compiled region."""
    return flex_mask_of(context_limits(anchors, lengths), seq_len, block_size)


def flex_mask_of(limits: Tensor, seq_len: int, block_size: int) -> BlockMask:
    """The same from `context_limits`, which the mask goes on reading.

    The tile size stays at flex attention's 128: the drafter's block size there fails in Inductor's lowering.
    """
    rows, count = limits.shape
    queries = count * block_size
    return create_block_mask(
        block_mask_mod(limits, seq_len, block_size),
        B=rows,
        H=None,
        Q_LEN=queries,
        KV_LEN=seq_len + queries,
        device=limits.device,
    )
