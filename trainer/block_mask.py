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
from torch.nn.attention.flex_attention import BlockMask

from trainer.anchors import Anchors

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
_TILE = 128


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


class FlexMask:
    """Makes the flex attention mask of one bucket from `context_limits`, long [N, `slots`].

    The same as `create_block_mask` gives, without ever having the mask itself (92 million entries at 3072 tokens and
    512 blocks of 16): a tile's count of visible entries is a sum over slots. Only kernels of its device, no value comes
    to the host, so that it may be inside a CUDA graph. The tile size stays at flex attention's 128: the drafter's block
    size there fails in Inductor's lowering.
    """

    def __init__(self, seq_len: int, block_size: int, slots: int, device: torch.device) -> None:
        self._seq_len = seq_len
        self._block_size = block_size
        queries = slots * block_size
        self._lengths = (queries, seq_len + queries)
        slot_starts = torch.arange(slots, device=device) * block_size
        query_tiles = torch.arange(-(-queries // _TILE), device=device) * _TILE
        self._key_tiles = torch.arange(-(-self._lengths[1] // _TILE), device=device) * _TILE
        # how many of a tile's queries are of a slot, and how many of a tile's keys: float32, whose products are exact
        self._queries = _overlap(query_tiles[:, None], slot_starts, block_size).float()
        self._own = _overlap(self._key_tiles, seq_len + slot_starts[:, None], block_size)

    def __call__(self, limits: Tensor) -> BlockMask:
        """The mask of `limits`, which it goes on reading."""
        context = (limits[:, :, None] - self._key_tiles).clamp(0, _TILE)
        visible = self._queries @ (context + self._own).float()
        full = visible == _TILE * _TILE
        partial = (visible > 0) & ~full
        # one by one: parts of a stacked tensor would not be aligned as compiled code wants its inputs
        kv_counts, kv_tiles = _in_order(partial)
        full_kv_counts, full_kv_tiles = _in_order(full)
        q_counts, q_tiles = _in_order(partial.transpose(-2, -1))
        full_q_counts, full_q_tiles = _in_order(full.transpose(-2, -1))
        return BlockMask(
            seq_lengths=self._lengths,
            kv_num_blocks=kv_counts,
            kv_indices=kv_tiles,
            full_kv_num_blocks=full_kv_counts,
            full_kv_indices=full_kv_tiles,
            q_num_blocks=q_counts,
            q_indices=q_tiles,
            full_q_num_blocks=full_q_counts,
            full_q_indices=full_q_tiles,
            BLOCK_SIZE=(_TILE, _TILE),
            mask_mod=block_mask_mod(limits, self._seq_len, self._block_size),
        )


def _overlap(tiles: Tensor, starts: Tensor, length: int) -> Tensor:
    """How much of [start, start + length) lies in each tile."""
    ends = torch.minimum(tiles + _TILE, starts + length)
    return (ends - torch.maximum(tiles, starts)).clamp(min=0)


def _in_order(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """Of bool [N, rows, columns]: how many of each row are True, [N, 1, rows], and its columns, those first.

    Both int32 and contiguous; columns [N, 1, rows, columns].
    """
    ones = tiles[:, None].to(torch.int32, memory_format=torch.contiguous_format)
    order = torch.argsort(ones, dim=-1, descending=True, stable=True)
    return ones.sum(dim=-1, dtype=torch.int32), order.to(torch.int32)
