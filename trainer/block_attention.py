"""The drafter's attention in training on a GPU: block queries over [context | own block], without any dense mask.

Two torch operators, so that `torch.compile` takes them as they are: `dflash::block_attention` and its backward. Their
kernels are in `block_kernels`; nothing comes to the host, so they may be inside a CUDA graph.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainer.block_mask import BlockRanges
from trainer.drafter_config import WIDEST_HEAD

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_ROOM = 227 << 10
_SUMMED = 2048
"""Numbers of one head that a program adds up over a group."""


class Tiling(NamedTuple):
    """Of one kernel: queries and keys that a program holds at once, its warps, tiles under way (1: none ahead)."""

    block_q: int
    block_k: int
    warps: int
    stages: int


class Tilings(NamedTuple):
    """Of the forward pass, and of the gradients of queries, of the context and of the blocks' keys."""

    forward: Tiling
    query: Tiling
    context: Tiling
    own: Tiling


TILINGS = {
    "roomy": {
        64: Tilings(Tiling(128, 64, 4, 3), Tiling(128, 64, 8, 3), Tiling(64, 128, 8, 3), Tiling(64, 64, 4, 2)),
        128: Tilings(Tiling(64, 64, 4, 3), Tiling(64, 64, 4, 2), Tiling(64, 64, 4, 2), Tiling(32, 32, 4, 2)),
        256: Tilings(Tiling(128, 32, 8, 2), Tiling(64, 32, 8, 2), Tiling(32, 64, 8, 2), Tiling(32, 32, 4, 2)),
    },
    "16-bit": {
        64: Tilings(Tiling(64, 32, 4, 2), Tiling(64, 32, 4, 2), Tiling(32, 64, 4, 2), Tiling(32, 32, 4, 2)),
        128: Tilings(Tiling(64, 32, 4, 2), Tiling(64, 32, 4, 2), Tiling(32, 32, 4, 2), Tiling(32, 32, 4, 2)),
        256: Tilings(Tiling(32, 16, 4, 1), Tiling(32, 16, 4, 1), Tiling(16, 32, 4, 1), Tiling(16, 32, 4, 1)),
    },
    "float32": {
        64: Tilings(Tiling(32, 32, 4, 1), Tiling(32, 32, 4, 1), Tiling(16, 32, 4, 1), Tiling(16, 32, 4, 1)),
        128: Tilings(Tiling(32, 32, 8, 1), Tiling(32, 16, 4, 1), Tiling(16, 16, 4, 1), Tiling(16, 32, 4, 1)),
        256: Tilings(Tiling(16, 16, 4, 1), Tiling(16, 16, 4, 1), Tiling(16, 16, 4, 1), Tiling(16, 16, 4, 1)),
    },
}
"""By the width of a head, up to the key. "roomy": 16-bit numbers where a program has 227 KiB of shared memory (H100,
H200). The others do with the 99 KiB of a small GPU."""


def tilings(dtype: torch.dtype, width: int, device: torch.device) -> Tilings:
    """For heads of `width`, a power of two up to 256."""
    kind = "float32" if dtype == torch.float32 else "16-bit"
    if kind == "16-bit" and device.type == "cuda":
        # AMD's properties have no such number
        room = getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0)
        kind = "roomy" if room >= _ROOM else kind
    return TILINGS[kind][max(64, width)]


def attend(queries: Tensor, context: tuple[Tensor, Tensor], own: tuple[Tensor, Tensor], ranges: BlockRanges) -> Tensor:
    """Softmax attention [N, heads, Q, dim] of `queries`, of the same shape, scaled by dim ** -0.5.

    `context` and `own`: keys and values [N, kv_heads, S or Q, dim], kv_heads divides heads. Q is whole blocks. The
    result lies in memory as [N, Q, heads, dim]. bfloat16, float16 or float32; dim up to 256, else ValueError.
    """
    starts, ends, block_size, causal = ranges
    mixed, _norms = block_attention(queries, *context, *own, starts, ends, block_size, causal)
    return mixed


@torch.library.custom_op("dflash::block_attention", mutates_args=())
def block_attention(  # noqa: PLR0917 -- an operator's
    queries: Tensor,
    context_keys: Tensor,
    context_values: Tensor,
    own_keys: Tensor,
    own_values: Tensor,
    starts: Tensor,
    ends: Tensor,
    block_size: int,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    """What `attend` gives, and the base-2 logarithm of each softmax's sum, float32 [N, heads, Q]."""
    from trainer import block_kernels

    shape = _Shape.of(queries, context_keys, block_size, causal)
    tiling = shape.tilings.forward
    mixed, norms = _like(queries), queries.new_empty(queries.shape[:3], dtype=torch.float32)
    queries, context_keys, context_values, own_keys, own_values = map(
        _dense, (queries, context_keys, context_values, own_keys, own_values)
    )
    block_kernels.forward[shape.grid(shape.heads, shape.count, tiling.block_q)](
        *_placed(queries, context_keys, context_values, own_keys, own_values),
        starts, ends, *_placed(mixed), norms, shape.count, shape.context, shape.scale, **shape.constants(tiling),
    )  # fmt: skip
    return mixed, norms


@block_attention.register_fake
def _(queries: Tensor, *_others: Any) -> tuple[Tensor, Tensor]:
    return _like(queries), queries.new_empty(queries.shape[:3], dtype=torch.float32)


@torch.library.custom_op("dflash::block_attention_backward", mutates_args=())
def block_attention_backward(  # noqa: PLR0917 -- an operator's
    gradient: Tensor,
    queries: Tensor,
    context_keys: Tensor,
    context_values: Tensor,
    own_keys: Tensor,
    own_values: Tensor,
    starts: Tensor,
    ends: Tensor,
    mixed: Tensor,
    norms: Tensor,
    block_size: int,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of the first five inputs of `block_attention`, from that of its result."""
    from trainer import block_kernels

    shape = _Shape.of(queries, context_keys, block_size, causal)
    count, context, rows = shape.count, shape.context, shape.rows
    to_query, to_context = _like(queries), (_like(context_keys), _like(context_values))
    to_own = _like(own_keys), _like(own_values)
    gradient, queries, context_keys, context_values, own_keys, own_values = map(
        _dense, (gradient, queries, context_keys, context_values, own_keys, own_values)
    )
    of_query, of_context, of_own = shape.tilings[1:]
    deltas = torch.empty_like(norms)
    tiles = -(-count // of_context.block_q)
    bounds = starts.new_empty((rows, 4, tiles))
    block_kernels.before_backward[shape.grid(shape.heads, count, of_context.block_q)](
        *_placed(mixed, gradient), deltas, starts, ends, bounds, count, context,
        dim=shape.dim, width=shape.width, block_q=of_context.block_q, num_warps=4,
    )  # fmt: skip
    block_kernels.query_gradient[shape.grid(shape.heads, count, of_query.block_q)](
        *_placed(queries, context_keys, context_values, own_keys, own_values), starts, ends, *_placed(gradient),
        norms, deltas, *_placed(to_query), count, context, shape.scale, shape.natural, **shape.constants(of_query),
    )  # fmt: skip
    found = to_context
    if shape.group > 1:
        partial = (rows, shape.heads, context, shape.dim)
        found = norms.new_empty(partial), norms.new_empty(partial)
    block_kernels.context_gradients[shape.grid(shape.heads, context, of_context.block_k)](
        *_placed(queries, context_keys, context_values), starts, ends, *_placed(gradient), norms, deltas, bounds,
        *_placed(*found), count, context, shape.scale, shape.natural, tiles,
        span=_power_of_two(tiles), **shape.constants(of_context),
    )  # fmt: skip
    if shape.group > 1:
        summed = max(1, _SUMMED // shape.width)
        block_kernels.sum_groups[shape.grid(shape.heads // shape.group, context, summed)](
            *found, found[0].stride()[:3], *_placed(*to_context), context,
            group=shape.group, dim=shape.dim, width=shape.width, block_k=summed, num_warps=4,
        )  # fmt: skip
    block_kernels.own_gradients[shape.grid(shape.heads // shape.group, count, of_own.block_k)](
        *_placed(queries, own_keys, own_values), starts, ends, *_placed(gradient), norms, deltas,
        *_placed(*to_own), count, context, shape.scale, shape.natural, **shape.constants(of_own),
    )  # fmt: skip
    return to_query, *to_context, *to_own


@block_attention_backward.register_fake
def _(_gradient: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    return tuple(map(_like, inputs[:5]))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:7], *output)
    ctx.block_size, ctx.causal = inputs[7:]


def _backward(ctx: Any, gradient: Tensor, _of_norms: Tensor) -> tuple[Tensor | None, ...]:
    found = block_attention_backward(gradient, *ctx.saved_tensors, ctx.block_size, ctx.causal)
    return (*found, None, None, None, None)


block_attention.register_autograd(_backward, setup_context=_keep)


@dataclass(frozen=True)
class _Shape:
    """What all kernels of a call share."""

    rows: int
    heads: int
    group: int
    count: int
    context: int
    dim: int
    width: int
    block_size: int
    causal: bool
    tilings: Tilings

    @staticmethod
    def of(queries: Tensor, context_keys: Tensor, block_size: int, causal: bool) -> _Shape:
        rows, heads, count, dim = queries.shape
        if queries.dtype not in _DTYPES or dim > WIDEST_HEAD:
            raise ValueError(
                f"block attention has kernels for 16-bit numbers and float32 and heads of up to {WIDEST_HEAD}, "
                f"not for {queries.dtype} and heads of {dim}"
            )
        width = max(16, _power_of_two(dim))
        return _Shape(
            rows, heads, heads // context_keys.shape[1], count, context_keys.shape[2], dim, width, block_size, causal,
            tilings(queries.dtype, width, queries.device),
        )  # fmt: skip

    @property
    def natural(self) -> float:
        return self.dim**-0.5

    @property
    def scale(self) -> float:
        """The kernels' exponentials are powers of two."""
        return self.natural * math.log2(math.e)

    def grid(self, heads: int, places: int, tile: int) -> tuple[int, int, int]:
        return heads, self.rows, -(-places // tile)

    def constants(self, tiling: Tiling) -> dict[str, Any]:
        return {
            "group": self.group,
            "block_size": self.block_size,
            "causal": self.causal,
            "dim": self.dim,
            "width": self.width,
            "block_q": tiling.block_q,
            "block_k": tiling.block_k,
            "num_warps": tiling.warps,
            "num_stages": tiling.stages,
        }


def _power_of_two(number: int) -> int:
    """The least that is no less than `number`."""
    return 1 << (number - 1).bit_length()


def _like(heads: Tensor) -> Tensor:
    """Room for [N, heads, P, dim] that lies as [N, P, heads, dim]: what a projection reads next, or gave."""
    rows, count, places, dim = heads.shape
    return heads.new_empty((rows, places, count, dim)).transpose(1, 2)


def _dense(heads: Tensor) -> Tensor:
    return heads if heads.stride(-1) == 1 else heads.contiguous()


def _placed(*tensors: Tensor) -> list[Any]:
    """Each tensor and its strides over rows, heads and places, as the kernels take them."""
    return [part for each in tensors for part in (each, each.stride()[:3])]
