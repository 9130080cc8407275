"""Who sees whom in training: the four rules of DFlash's attention mask, dense (SDPA) and for flex attention.

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

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from trainer.anchors import Anchors
from trainer.drafter_config import DrafterConfig, SlidingWindow

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
_TILE = 128


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


def block_mask_mod(limits: Tensor, seq_len: int, block_size: int, window: SlidingWindow | None = None) -> MaskMod:
    """The same rules as a flex attention `mask_mod(batch, head, query, key)`, of `context_limits`."""
    # plain numbers: this is traced into the attention kernel
    reach, step = (window.reach, window.step) if window else (seq_len, 0)
    sliding, causal = window is not None, window is not None and window.causal

    def mask_mod(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        slot = query // block_size
        own = (key >= seq_len) & ((key - seq_len) // block_size == slot)
        if not sliding:
            return (key < limits[batch, slot]) | own
        limit = limits[batch, slot]
        context = (key < limit) & (key >= limit - reach + step * (query - slot * block_size))
        return context | (own & (key - seq_len <= query) if causal else own)

    return mask_mod


class FlexMask:
    """Makes the flex attention mask of one bucket from `context_limits`, long [N, `slots`].

    The same as `create_block_mask` gives, without ever having the mask itself (92 million entries at 3072 tokens and
    512 blocks of 16): a tile's count of visible entries is a sum over queries. Only kernels of its device, no value
    comes to the host, so that it may be inside a CUDA graph. The tile size stays at flex attention's 128: the drafter's
    block size there fails in Inductor's lowering.
    """

    def __init__(
        self, seq_len: int, block_size: int, slots: int, device: torch.device, window: SlidingWindow | None = None
    ) -> None:
        self._seq_len = seq_len
        self._block_size = block_size
        self._window = window
        queries = slots * block_size
        self._lengths = (queries, seq_len + queries)
        self._key_tiles = torch.arange(-(-self._lengths[1] // _TILE), device=device) * _TILE
        query = torch.arange(queries, device=device)
        first = query // block_size * block_size
        last = query if window is not None and window.causal else first + block_size - 1
        own = _overlap(self._key_tiles, seq_len + first[:, None], seq_len + last[:, None] + 1)
        self._own = _by_query_tile(own[None])

    def __call__(self, limits: Tensor) -> BlockMask:
        """The mask of `limits`, which it goes on reading."""
        starts, ends = context_ranges(limits, self._block_size, self._window)
        visible = _by_query_tile(_overlap(self._key_tiles, starts[:, :, None], ends[:, :, None])) + self._own
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
            mask_mod=block_mask_mod(limits, self._seq_len, self._block_size, self._window),
        )


def _overlap(tiles: Tensor, starts: Tensor, ends: Tensor) -> Tensor:
    """How much of [start, end) lies in each tile."""
    return (torch.minimum(tiles + _TILE, ends) - torch.maximum(tiles, starts)).clamp(min=0)


def _by_query_tile(counts: Tensor) -> Tensor:
    """[N, queries, key tiles] summed over the queries of each tile."""
    padding = -counts.shape[1] % _TILE
    return F.pad(counts, (0, 0, 0, padding)).unflatten(1, (-1, _TILE)).sum(dim=2)


def _in_order(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """Of bool [N, rows, columns]: how many of each row are True, [N, 1, rows], and its columns, those first.

    Both int32 and contiguous; columns [N, 1, rows, columns].
    """
    ones = tiles[:, None].to(torch.int32, memory_format=torch.contiguous_format)
    order = torch.argsort(ones, dim=-1, descending=True, stable=True)
    return ones.sum(dim=-1, dtype=torch.int32), order.to(torch.int32)
