"""Who sees whom: the dense mask against the rules, flex attention's against the dense one, and no leaks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from tests.trainer.drafting import batch, drafter, generator, windows
from trainer.anchors import block_token_ids
from trainer.block_mask import FlexMask, block_mask_mod, context_limits, dense_block_mask
from trainer.compile import CompileLog
from trainer.drafter_config import SlidingWindow

pytestmark = pytest.mark.torch

shapes = st.fixed_dictionaries(
    {
        "rows": st.integers(1, 3),
        "length": st.integers(2, 18),
        "anchors": st.integers(1, 9),
        "block_size": st.integers(2, 6),
        "supervised": st.sampled_from([0.0, 0.3, 0.9, 1.0]),
    }
)
# how much longer than a block, and which of `windows`
sliding = st.tuples(st.integers(0, 6), st.integers(0, 4))


def context(window, limit, slot):
    """What a slot sees of the context, in words: the last `size` positions before the anchor, or up to itself."""
    if window is None:
        return range(limit)
    first = limit - window.size if window.origin == "anchor" else limit + slot - window.size + 1
    return range(max(0, first), limit)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), shapes, sliding)
def test_dense_and_flex_masks_follow_the_rules(seed, shape, slides):
    data = batch(seed, **shape)
    length, size = shape["length"], shape["block_size"]
    window = windows(size + slides[0])[slides[1]]
    mask = dense_block_mask(data.anchors, data.lengths, length, size, window)
    queries = shape["anchors"] * size
    assert mask.shape == (shape["rows"], 1, queries, length + queries)
    for row in range(shape["rows"]):
        for slot in range(shape["anchors"]):
            limit = int(data.anchors.positions[row, slot]) if data.anchors.keep[row, slot] else 0
            for k in range(size):
                query = slot * size + k
                own = range(
                    length + slot * size, length + (query + 1 if window and window.causal else slot * size + size)
                )
                assert mask[row, 0, query].nonzero()[:, 0].tolist() == [*context(window, limit, k), *own]
    mod = block_mask_mod(context_limits(data.anchors, data.lengths), length, size, window)
    rows, query, key = torch.meshgrid(
        torch.arange(shape["rows"]), torch.arange(queries), torch.arange(length + queries), indexing="ij"
    )
    assert torch.equal(mod(rows, torch.zeros_like(rows), query, key), mask[:, 0])


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("window", windows(20))
def test_flex_and_dense_forwards_agree(window):
    # over one 128-wide tile, so that whole tiles are skipped too
    data = batch(5, rows=2, length=150, anchors=40, window=window)
    model, limits = drafter(1, config=data.config), context_limits(data.anchors, data.lengths)
    flex = [
        FlexMask(150, 4, 40, torch.device("cpu"), data.config.window_of(kind))(limits)
        for kind in data.config.attention_types
    ]
    with torch.no_grad():
        wanted = model(data.block_embeddings, data.target_hidden, data.anchors.positions, *data.masks)
        found = model(data.block_embeddings, data.target_hidden, data.anchors.positions, *flex)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("window", windows(5))
def test_nothing_at_or_after_an_anchor_leaks_into_its_block(window):
    data = batch(11, rows=2, length=16, anchors=8, supervised=1.0, window=window)
    size, model = 4, drafter(2, config=data.config)

    def run(embeddings, hidden):
        with torch.no_grad():
            return model(embeddings, hidden, data.anchors.positions, *data.masks)

    embeddings = data.block_embeddings
    before = run(embeddings, data.target_hidden)
    assert data.anchors.keep.sum() > 8
    for row, slot in data.anchors.keep.nonzero().tolist():
        anchor, own = int(data.anchors.positions[row, slot]), slice(slot * size, (slot + 1) * size)
        later = data.target_hidden.clone()
        later[row, anchor:] += 5.0
        others = embeddings + 5.0
        others[row, own] = embeddings[row, own]
        after = run(others, later)
        assert torch.equal(after[row, own], before[row, own]), (row, slot)
        if anchor:
            earlier = data.target_hidden.clone()
            earlier[row, anchor - 1] += 5.0
            assert not torch.allclose(run(embeddings, earlier)[row, own], before[row, own])


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10_000), shapes, sliding)
def test_no_token_behind_an_anchor_reaches_its_block_on_the_way_from_ids(seed, shape, slides):
    """All that a step makes of a row's tokens: the other blocks' inputs, and hidden states that know every token."""
    data = batch(seed, **shape, window=windows(shape["block_size"] + slides[0])[slides[1]])
    model, size, length = drafter(seed, config=data.config), shape["block_size"], shape["length"]
    numbers = generator(seed + 1)

    def run(ids, hidden):
        blocks = data.embedding[block_token_ids(ids, data.anchors, size, data.config.mask_token_id)]
        with torch.no_grad():
            hidden = model(blocks, hidden, data.anchors.positions, *data.masks)
        return (hidden @ data.embedding.T).view(*data.anchors.positions.shape, size, -1)

    before = run(data.input_ids, data.target_hidden)
    for row, slot in data.anchors.keep.nonzero().tolist()[:4]:
        anchor = int(data.anchors.positions[row, slot])
        ids, hidden = data.input_ids.clone(), data.target_hidden.clone()
        ids[row, anchor + 1 :] = torch.randint(0, 39, (length - anchor - 1,), generator=numbers)
        hidden[row, anchor:] = torch.randn(hidden[row, anchor:].shape, generator=numbers, dtype=torch.float64)
        assert torch.equal(run(ids, hidden)[row, slot], before[row, slot])


@pytest.mark.parametrize("window", windows(5)[1:])
def test_a_drafter_of_sliding_layers_only_sees_its_window_and_no_more(window):
    """One layer, so that nothing reaches a slot by way of another one."""
    data = batch(3, rows=1, length=16, anchors=4, supervised=1.0, window=window)
    config = replace(data.config, num_hidden_layers=1)
    model, size = drafter(2, config=config), 4

    def run(hidden, embeddings):
        with torch.no_grad():
            return model(embeddings, hidden, data.anchors.positions, data.masks[1]).view(4, size, -1)

    before = run(data.target_hidden, data.block_embeddings)
    for place in range(16):
        changed = data.target_hidden.clone()
        changed[:, place] += 5.0
        moved = (run(changed, data.block_embeddings) != before).any(dim=-1)
        for block, anchor in enumerate(data.anchors.positions[0].tolist()):
            assert moved[block].tolist() == [place in context(window, anchor, k) for k in range(size)], (place, anchor)
    for slot in range(size):
        changed = data.block_embeddings.clone()
        changed.view(1, 4, size, -1)[:, :, slot] += 5.0
        moved = (run(data.target_hidden, changed) != before).any(dim=-1)
        assert all(each.tolist() == [not window.causal or k >= slot for k in range(size)] for each in moved)


def test_padding_slots_stay_finite():
    data = batch(3, rows=2, length=6, anchors=7, supervised=0.0)
    assert not data.anchors.keep.any()
    mask = dense_block_mask(data.anchors, data.lengths, 6, 4)
    hidden = drafter(0)(data.block_embeddings, data.target_hidden, data.anchors.positions, mask)
    hidden.sum().backward()
    assert hidden.isfinite().all()


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    rows=st.integers(1, 3),
    length=st.sampled_from([1, 7, 127, 128, 129, 200, 256, 300]),
    block_size=st.sampled_from([2, 3, 8, 10, 16, 128, 130]),
    slots=st.integers(1, 12),
    slides=st.tuples(st.sampled_from([0, 1, 40, 128]), st.integers(0, 4)),
)
def test_the_closed_form_mask_is_what_flex_attention_makes_itself(seed, rows, length, block_size, slots, slides):
    draw = generator(seed)
    limits = torch.randint(0, length + 1, (rows, slots), generator=draw)
    window = windows(block_size + slides[0])[slides[1]]
    found = FlexMask(length, block_size, slots, limits.device, window)(limits)
    queries = slots * block_size
    wanted = create_block_mask(found.mask_mod, rows, None, queries, length + queries, limits.device)
    for name in (
        "kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices",
        "q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices",
    ):  # fmt: skip
        one, other = getattr(found, name), getattr(wanted, name)
        assert one.dtype == other.dtype and one.stride() == other.stride(), name
        assert torch.equal(one, other), name
    assert (found.shape, found.BLOCK_SIZE) == (wanted.shape, wanted.BLOCK_SIZE)


@pytest.mark.parametrize("window", [None, SlidingWindow(9)])
def test_a_mask_of_other_limits_compiles_nothing_again(window):
    masks = FlexMask(150, 4, 40, torch.device("cpu"), window)
    query = torch.randn((2, 1, 160, 16), generator=generator(0))
    keys = torch.randn((2, 1, 310, 16), generator=generator(1))

    def attend(mask):
        return flex_attention(query, keys, keys, block_mask=mask)

    compiled = torch.compile(attend, backend="eager", fullgraph=True, dynamic=False)
    with CompileLog() as log, torch.no_grad():
        for turn in range(3):
            limits = torch.randint(0, 150, (2, 40), generator=generator(turn))
            compiled(masks(limits))
    assert len(log.events) == 1
