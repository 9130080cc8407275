"""Who sees whom: the dense mask against the rules, the kernels' ranges against the dense one, and no leaks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainer.drafting import batch, drafter, generator, windows
from trainer.anchors import block_token_ids
from trainer.block_mask import block_ranges, context_limits, dense_block_mask

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
def test_masks_follow_the_rules(seed, shape, slides):
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
    starts, ends, *own = block_ranges(context_limits(data.anchors, data.lengths), size, window)
    key = torch.arange(length)
    seen = (key >= starts[:, :, None]) & (key < ends[:, :, None])
    assert torch.equal(seen, mask[:, 0, :, :length])
    assert own == [size, window is not None and window.causal]
    assert all(each.dtype == torch.int32 and each.is_contiguous() for each in (starts, ends))


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
        drafts = slice(slot * (size - 1), (slot + 1) * (size - 1))
        assert torch.equal(after[row, drafts], before[row, drafts]), (row, slot)
        if anchor:
            earlier = data.target_hidden.clone()
            earlier[row, anchor - 1] += 5.0
            assert not torch.allclose(run(embeddings, earlier)[row, drafts], before[row, drafts])


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
        return (hidden @ data.embedding.T).view(*data.anchors.positions.shape, size - 1, -1)

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
            return model(embeddings, hidden, data.anchors.positions, data.masks[1]).view(4, size - 1, -1)

    before = run(data.target_hidden, data.block_embeddings)
    for place in range(16):
        changed = data.target_hidden.clone()
        changed[:, place] += 5.0
        moved = (run(changed, data.block_embeddings) != before).any(dim=-1)
        for block, anchor in enumerate(data.anchors.positions[0].tolist()):
            assert moved[block].tolist() == [place in context(window, anchor, k) for k in range(1, size)], (
                place,
                anchor,
            )
    for slot in range(size):
        changed = data.block_embeddings.clone()
        changed.view(1, 4, size, -1)[:, :, slot] += 5.0
        moved = (run(data.target_hidden, changed) != before).any(dim=-1)
        assert all(each.tolist() == [not window.causal or k >= slot for k in range(1, size)] for each in moved)


def test_padding_slots_stay_finite():
    data = batch(3, rows=2, length=6, anchors=7, supervised=0.0)
    assert not data.anchors.keep.any()
    mask = dense_block_mask(data.anchors, data.lengths, 6, 4)
    hidden = drafter(0)(data.block_embeddings, data.target_hidden, data.anchors.positions, mask)
    hidden.sum().backward()
    assert hidden.isfinite().all()
