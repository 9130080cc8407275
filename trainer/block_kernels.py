"""The Triton kernels of `trainer.block_attention`.

FlashAttention-2 (arXiv:2307.08691) for a block's two kinds of keys. The context: a query sees start .. end - 1 of it.
A tile of queries (or of keys) visits only what one of its queries sees (`_hull`), and masks only what not all of them
see (`_core`). The blocks: a tile meets only the blocks that it touches. Sorted starts and ends are fast, any are
right. No sum is atomic: its order is always the same, and replicas stay equal bit for bit.

Tensors have any strides but in the last dimension, which is dense. Grids begin with the programs that do the most.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _at(base, strides, row, head):  # type: ignore[no-untyped-def]
    return base + row.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[1]


@triton.jit
def _load(base, stride, places, count, dim: tl.constexpr, width: tl.constexpr, whole: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: PLR0917
    """[places, width], zeros beyond `count` places and `dim` columns; `whole`: none of the places is beyond."""
    column = tl.arange(0, width)
    source = base + places[:, None] * stride + column[None, :]
    if whole and dim == width:
        found = tl.load(source)
    else:
        found = tl.load(source, mask=(places[:, None] < count) & (column[None, :] < dim), other=0.0)
    return found


@triton.jit
def _store(base, stride, places, count, value, dim: tl.constexpr, width: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: PLR0917
    column = tl.arange(0, width)
    inside = (places[:, None] < count) & (column[None, :] < dim)
    tl.store(base + places[:, None] * stride + column[None, :], value.to(base.dtype.element_ty), mask=inside)


@triton.jit
def _ranges(starts, ends, query, count, context):  # type: ignore[no-untyped-def]
    """Start and end of each query, inside the context; empty for those beyond `count`."""
    inside = query < count
    start = tl.maximum(tl.load(starts + query, mask=inside, other=0), 0)
    end = tl.minimum(tl.load(ends + query, mask=inside, other=0), context)
    return start, end


@triton.jit
def _hull(start, end, context):  # type: ignore[no-untyped-def]
    """The least range that holds all that some query sees; context .. 0 where none sees anything."""
    any_seen = start < end
    return tl.min(tl.where(any_seen, start, context)), tl.max(tl.where(any_seen, end, 0))


@triton.jit
def _core(start, end, inside, context):  # type: ignore[no-untyped-def]
    """What every query inside sees; empty where one of them sees nothing."""
    return tl.max(tl.where(inside, start, 0)), tl.min(tl.where(inside, end, context))


@triton.jit
def _key_tiles(start, end, inside, context, block_k: tl.constexpr):  # type: ignore[no-untyped-def]
    """Key tiles first .. last - 1 are to be visited, of those inner .. outer - 1 are seen whole by all queries."""
    low, high = _hull(start, end, context)
    core_low, core_high = _core(start, end, inside, context)
    last = tl.cdiv(high, block_k)
    first = tl.minimum(low // block_k, last)
    inner = tl.minimum(tl.maximum(tl.cdiv(core_low, block_k), first), last)
    outer = tl.minimum(tl.maximum(core_high // block_k, inner), last)
    return first, inner, outer, last


@triton.jit
def _partial_tile(step, first, inner, outer):  # type: ignore[no-untyped-def]
    """Of the tiles on both sides of inner .. outer - 1, the one whose turn it is."""
    tile = first + step
    return tl.where(tile < inner, tile, tile + outer - inner)


@triton.jit
def _touched(first, tile: tl.constexpr, block_size: tl.constexpr, step: tl.constexpr):  # type: ignore[no-untyped-def]
    """The blocks that first .. first + tile - 1 lie in: where they begin, and how many steps they take."""
    begin = first // block_size * block_size
    return begin, tl.cdiv(tl.cdiv(first + tile, block_size) * block_size - begin, step)


@triton.jit
def _sees(query, key, start, end, own: tl.constexpr, block_size: tl.constexpr, causal: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: PLR0917
    """Rules 1 and 2 of `block_mask`; one of query and key is a row, the other a column."""
    if own:
        # no query inside shares its block with a key beyond the last: blocks are whole
        seen = query // block_size == key // block_size
        if causal:
            seen = seen & (key <= query)
    else:
        seen = (key >= start) & (key < end)
    return seen


@triton.jit
def _attend(  # type: ignore[no-untyped-def]  # noqa: PLR0917
    mixed, top, total, q, query, start, end, keys, key_stride, values, value_stride, key, count, scale,
    part: tl.constexpr, block_size: tl.constexpr, causal: tl.constexpr, dim: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    """One tile of keys more in the running softmax. `part`: "whole", "partial" (both context) or "own"."""
    k = _load(keys, key_stride, key, count, dim, width, part == "whole")
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if part != "whole":
        seen = _sees(query[:, None], key[None, :], start[:, None], end[:, None], part == "own", block_size, causal)
        scores = tl.where(seen, scores, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, 1) * scale)
    weights = tl.exp2(scores * scale - higher[:, None])
    shrink = tl.exp2(top - higher)
    v = _load(values, value_stride, key, count, dim, width, part == "whole")
    mixed = tl.dot(weights.to(v.dtype), v, mixed * shrink[:, None], input_precision="ieee")
    return mixed, higher, total * shrink + tl.sum(weights, 1)


@triton.jit
def forward(  # type: ignore[no-untyped-def]  # noqa: PLR0917
    queries, query_at, context_keys, context_key_at, context_values, context_value_at,
    own_keys, own_key_at, own_values, own_value_at, starts, ends, mixed_out, mixed_at, norms,
    count, context, scale, group: tl.constexpr, block_size: tl.constexpr, causal: tl.constexpr,
    dim: tl.constexpr, width: tl.constexpr, block_q: tl.constexpr, block_k: tl.constexpr,
):  # fmt: skip
    head, row = tl.program_id(0), tl.program_id(1)
    at = (tl.num_programs(2) - 1 - tl.program_id(2)) * block_q
    query = at + tl.arange(0, block_q)
    start, end = _ranges(starts + row * count, ends + row * count, query, count, context)
    q = _load(_at(queries, query_at, row, head), query_at[2], query, count, dim, width, False)
    # finite: a tile may have nothing for some of its queries
    top = tl.full([block_q], -1e30, tl.float32)
    total = tl.zeros([block_q], tl.float32)
    mixed = tl.zeros([block_q, width], tl.float32)

    keys, values = _at(own_keys, own_key_at, row, head // group), _at(own_values, own_value_at, row, head // group)
    begin, steps = _touched(at, block_q, block_size, block_k)
    for step in range(steps):
        key = begin + step * block_k + tl.arange(0, block_k)
        mixed, top, total = _attend(
            mixed, top, total, q, query, start, end, keys, own_key_at[2], values, own_value_at[2], key, count, scale,
            "own", block_size, causal, dim, width,
        )  # fmt: skip

    keys = _at(context_keys, context_key_at, row, head // group)
    values = _at(context_values, context_value_at, row, head // group)
    first, inner, outer, last = _key_tiles(start, end, query < count, context, block_k)
    for step in range(inner - first + last - outer):
        key = _partial_tile(step, first, inner, outer) * block_k + tl.arange(0, block_k)
        mixed, top, total = _attend(
            mixed, top, total, q, query, start, end, keys, context_key_at[2], values, context_value_at[2], key,
            context, scale, "partial", block_size, causal, dim, width,
        )  # fmt: skip
    for tile in range(inner, outer):
        key = tile * block_k + tl.arange(0, block_k)
        mixed, top, total = _attend(
            mixed, top, total, q, query, start, end, keys, context_key_at[2], values, context_value_at[2], key,
            context, scale, "whole", block_size, causal, dim, width,
        )  # fmt: skip

    _store(_at(mixed_out, mixed_at, row, head), mixed_at[2], query, count, mixed / total[:, None], dim, width)
    flat = (row * tl.num_programs(0) + head).to(tl.int64) * count
    tl.store(norms + flat + query, top + tl.log2(total), mask=query < count)


@triton.jit
def before_backward(  # type: ignore[no-untyped-def]  # noqa: PLR0917
    mixed, mixed_at, gradient, gradient_at, deltas, starts, ends, bounds, count, context,
    dim: tl.constexpr, width: tl.constexpr, block_q: tl.constexpr,
):  # fmt: skip
    """Each query's sum of output x gradient, and of each tile of queries hull and core: `bounds` [rows, 4, tiles]."""
    head, row, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    query = tile * block_q + tl.arange(0, block_q)
    out = _load(_at(mixed, mixed_at, row, head), mixed_at[2], query, count, dim, width, False)
    back = _load(_at(gradient, gradient_at, row, head), gradient_at[2], query, count, dim, width, False)
    delta = tl.sum(out.to(tl.float32) * back.to(tl.float32), 1)
    flat = (row * tl.num_programs(0) + head).to(tl.int64) * count
    tl.store(deltas + flat + query, delta, mask=query < count)
    if head == 0:
        start, end = _ranges(starts + row * count, ends + row * count, query, count, context)
        low, high = _hull(start, end, context)
        core_low, core_high = _core(start, end, query < count, context)
        tiles = tl.num_programs(2)
        place = bounds + row * 4 * tiles + tile
        tl.store(place, low)
        tl.store(place + tiles, high)
        tl.store(place + 2 * tiles, core_low)
        tl.store(place + 3 * tiles, core_high)


@triton.jit
def _back_to_query(  # type: ignore[no-untyped-def]  # noqa: PLR0917
    found, q, back, norm, delta, query, start, end, keys, key_stride, values, value_stride, key, count, scale,
    part: tl.constexpr, block_size: tl.constexpr, causal: tl.constexpr, dim: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    """Adds one tile of keys to the gradient of a tile of queries."""
    k = _load(keys, key_stride, key, count, dim, width, part == "whole")
    v = _load(values, value_stride, key, count, dim, width, part == "whole")
    weights = tl.exp2(tl.dot(q, tl.trans(k), input_precision="ieee") * scale - norm[:, None])
    if part != "whole":
        seen = _sees(query[:, None], key[None, :], start[:, None], end[:, None], part == "own", block_size, causal)
        weights = tl.where(seen, weights, 0.0)
    scores = weights * (tl.dot(back, tl.trans(v), input_precision="ieee") - delta[:, None])
    return tl.dot(scores.to(k.dtype), k, found, input_precision="ieee")


@triton.jit
def query_gradient(  # type: ignore[no-untyped-def]  # noqa: PLR0917
    queries, query_at, context_keys, context_key_at, context_values, context_value_at,
    own_keys, own_key_at, own_values, own_value_at, starts, ends, gradient, gradient_at, norms, deltas,
    found_out, found_at, count, context, scale, natural, group: tl.constexpr, block_size: tl.constexpr,
    causal: tl.constexpr, dim: tl.constexpr, width: tl.constexpr, block_q: tl.constexpr, block_k: tl.constexpr,
):  # fmt: skip
    head, row = tl.program_id(0), tl.program_id(1)
    at = (tl.num_programs(2) - 1 - tl.program_id(2)) * block_q
    query = at + tl.arange(0, block_q)
    start, end = _ranges(starts + row * count, ends + row * count, query, count, context)
    q = _load(_at(queries, query_at, row, head), query_at[2], query, count, dim, width, False)
    back = _load(_at(gradient, gradient_at, row, head), gradient_at[2], query, count, dim, width, False)
    flat = (row * tl.num_programs(0) + head).to(tl.int64) * count
    norm = tl.load(norms + flat + query, mask=query < count, other=0.0)
    delta = tl.load(deltas + flat + query, mask=query < count, other=0.0)
    found = tl.zeros([block_q, width], tl.float32)

    keys, values = _at(own_keys, own_key_at, row, head // group), _at(own_values, own_value_at, row, head // group)
    begin, steps = _touched(at, block_q, block_size, block_k)
    for step in range(steps):
        key = begin + step * block_k + tl.arange(0, block_k)
        found = _back_to_query(
            found, q, back, norm, delta, query, start, end, keys, own_key_at[2], values, own_value_at[2], key, count,
            scale, "own", block_size, causal, dim, width,
        )  # fmt: skip

    keys = _at(context_keys, context_key_at, row, head // group)
    values = _at(context_values, context_value_at, row, head // group)
    first, inner, outer, last = _key_tiles(start, end, query < count, context, block_k)
    for step in range(inner - first + last - outer):
        key = _partial_tile(step, first, inner, outer) * block_k + tl.arange(0, block_k)
        found = _back_to_query(
            found, q, back, norm, delta, query, start, end, keys, context_key_at[2], values, context_value_at[2], key,
            context, scale, "partial", block_size, causal, dim, width,
        )  # fmt: skip
    for tile in range(inner, outer):
        key = tile * block_k + tl.arange(0, block_k)
        found = _back_to_query(
            found, q, back, norm, delta, query, start, end, keys, context_key_at[2], values, context_value_at[2], key,
            context, scale, "whole", block_size, causal, dim, width,
        )  # fmt: skip
    _store(_at(found_out, found_at, row, head), found_at[2], query, count, found * natural, dim, width)


@triton.jit
def _back_to_keys(  # type: ignore[no-untyped-def]  # noqa: PLR0917
    to_k, to_v, k, v, key, queries, query_stride, gradient, gradient_stride, norms, deltas, starts, ends, query,
    count, context, scale,
    part: tl.constexpr, block_size: tl.constexpr, causal: tl.constexpr, dim: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    """Adds one tile of queries to the gradients of a tile of keys and values."""
    # queries beyond the last are zeros, and so is all that they add
    q = _load(queries, query_stride, query, count, dim, width, False)
    norm = tl.load(norms + query, mask=query < count, other=0.0)
    weights = tl.exp2(tl.dot(k, tl.trans(q), input_precision="ieee") * scale - norm[None, :])
    if part != "whole":
        start, end = _ranges(starts, ends, query, count, context)
        seen = _sees(query[None, :], key[:, None], start[None, :], end[None, :], part == "own", block_size, causal)
        weights = tl.where(seen, weights, 0.0)
    back = _load(gradient, gradient_stride, query, count, dim, width, False)
    delta = tl.load(deltas + query, mask=query < count, other=0.0)
    to_v = tl.dot(weights.to(back.dtype), back, to_v, input_precision="ieee")
    scores = weights * (tl.dot(v, tl.trans(back), input_precision="ieee") - delta[None, :])
    to_k = tl.dot(scores.to(q.dtype), q, to_k, input_precision="ieee")
    return to_k, to_v


@triton.jit
def context_gradients(  # type: ignore[no-untyped-def]  # noqa: PLR0917
    queries, query_at, keys, key_at, values, value_at, starts, ends, gradient, gradient_at, norms, deltas, bounds,
    to_keys, to_key_at, to_values, to_value_at, count, context, scale, natural, tiles, group: tl.constexpr,
    block_size: tl.constexpr, causal: tl.constexpr, dim: tl.constexpr, width: tl.constexpr,
    block_q: tl.constexpr, block_k: tl.constexpr, span: tl.constexpr,
):  # fmt: skip
    """What one query head gives to one tile of the context. `span`: a power of two, no less than `tiles`."""
    head, row = tl.program_id(0), tl.program_id(1)
    # the earliest keys are seen by the most blocks
    at = tl.program_id(2) * block_k
    key = at + tl.arange(0, block_k)

    index = tl.arange(0, span)
    table, there = bounds + row * 4 * tiles + index, index < tiles
    low, high = tl.load(table, mask=there, other=context), tl.load(table + tiles, mask=there, other=0)
    core_low = tl.load(table + 2 * tiles, mask=there, other=context)
    core_high = tl.load(table + 3 * tiles, mask=there, other=0)
    any_seen = (low < at + block_k) & (high > at)
    all_seen = (core_low <= at) & (core_high >= at + block_k)
    last = tl.max(tl.where(any_seen, index + 1, 0))
    first = tl.min(tl.where(any_seen, index, last))
    inner = tl.min(tl.where(all_seen, index, last))
    outer = tl.min(tl.where((index > inner) & (index < last) & (all_seen == 0), index, last))

    k = _load(_at(keys, key_at, row, head // group), key_at[2], key, context, dim, width, False)
    v = _load(_at(values, value_at, row, head // group), value_at[2], key, context, dim, width, False)
    queries, gradient = _at(queries, query_at, row, head), _at(gradient, gradient_at, row, head)
    flat = (row * tl.num_programs(0) + head).to(tl.int64) * count
    norms, deltas = norms + flat, deltas + flat
    starts, ends = starts + row * count, ends + row * count
    to_k = tl.zeros([block_k, width], tl.float32)
    to_v = tl.zeros([block_k, width], tl.float32)
    for step in range(inner - first + last - outer):
        query = _partial_tile(step, first, inner, outer) * block_q + tl.arange(0, block_q)
        to_k, to_v = _back_to_keys(
            to_k, to_v, k, v, key, queries, query_at[2], gradient, gradient_at[2], norms, deltas, starts, ends, query,
            count, context, scale, "partial", block_size, causal, dim, width,
        )  # fmt: skip
    for tile in range(inner, outer):
        query = tile * block_q + tl.arange(0, block_q)
        to_k, to_v = _back_to_keys(
            to_k, to_v, k, v, key, queries, query_at[2], gradient, gradient_at[2], norms, deltas, starts, ends, query,
            count, context, scale, "whole", block_size, causal, dim, width,
        )  # fmt: skip
    _store(_at(to_keys, to_key_at, row, head), to_key_at[2], key, context, to_k * natural, dim, width)
    _store(_at(to_values, to_value_at, row, head), to_value_at[2], key, context, to_v, dim, width)


@triton.jit
def own_gradients(  # type: ignore[no-untyped-def]  # noqa: PLR0917
    queries, query_at, keys, key_at, values, value_at, starts, ends, gradient, gradient_at, norms, deltas,
    to_keys, to_key_at, to_values, to_value_at, count, context, scale, natural, group: tl.constexpr,
    block_size: tl.constexpr, causal: tl.constexpr, dim: tl.constexpr, width: tl.constexpr,
    block_q: tl.constexpr, block_k: tl.constexpr,
):  # fmt: skip
    """What all query heads of a group give to one tile of the blocks' keys."""
    own_head, row = tl.program_id(0), tl.program_id(1)
    at = tl.program_id(2) * block_k
    key = at + tl.arange(0, block_k)
    k = _load(_at(keys, key_at, row, own_head), key_at[2], key, count, dim, width, False)
    v = _load(_at(values, value_at, row, own_head), value_at[2], key, count, dim, width, False)
    starts, ends = starts + row * count, ends + row * count
    to_k = tl.zeros([block_k, width], tl.float32)
    to_v = tl.zeros([block_k, width], tl.float32)
    begin, steps = _touched(at, block_k, block_size, block_q)
    for step in range(group * steps):
        head = own_head * group + step // steps
        query = begin + step % steps * block_q + tl.arange(0, block_q)
        flat = (row * tl.num_programs(0) * group + head).to(tl.int64) * count
        to_k, to_v = _back_to_keys(
            to_k, to_v, k, v, key, _at(queries, query_at, row, head), query_at[2],
            _at(gradient, gradient_at, row, head), gradient_at[2], norms + flat, deltas + flat, starts, ends, query,
            count, context, scale, "own", block_size, causal, dim, width,
        )  # fmt: skip
    _store(_at(to_keys, to_key_at, row, own_head), to_key_at[2], key, count, to_k * natural, dim, width)
    _store(_at(to_values, to_value_at, row, own_head), to_value_at[2], key, count, to_v, dim, width)


@triton.jit
def sum_groups(  # type: ignore[no-untyped-def]  # noqa: PLR0917
    keys, values, partial_at, to_keys, to_key_at, to_values, to_value_at, context, group: tl.constexpr,
    dim: tl.constexpr, width: tl.constexpr, block_k: tl.constexpr,
):  # fmt: skip
    """The gradients of a tile of the context, of what each query head gave to it."""
    head, row = tl.program_id(0), tl.program_id(1)
    key = tl.program_id(2) * block_k + tl.arange(0, block_k)
    to_k = tl.zeros([block_k, width], tl.float32)
    to_v = tl.zeros([block_k, width], tl.float32)
    for member in range(group):
        from_head = head * group + member
        to_k += _load(_at(keys, partial_at, row, from_head), partial_at[2], key, context, dim, width, False)
        to_v += _load(_at(values, partial_at, row, from_head), partial_at[2], key, context, dim, width, False)
    _store(_at(to_keys, to_key_at, row, head), to_key_at[2], key, context, to_k, dim, width)
    _store(_at(to_values, to_value_at, row, head), to_value_at[2], key, context, to_v, dim, width)
