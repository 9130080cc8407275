"""Who sees whom: the dense mask against the four rules, flex attention's against the dense one, and no leaks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainer.drafting import batch, drafter
from trainer.block_mask import block_mask_mod, context_limits, dense_block_mask, flex_block_mask

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


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), shapes)
def test_dense_and_flex_masks_follow_the_four_rules(seed, shape):
    data = batch(seed, **shape)
    length, size = shape["length"], shape["block_size"]
    mask = dense_block_mask(data.anchors, data.lengths, length, size)
    queries = shape["anchors"] * size
    assert mask.shape == (shape["rows"], 1, queries, length + queries)
    for row in range(shape["rows"]):
        for slot in range(shape["anchors"]):
            context = int(data.anchors.positions[row, slot]) if data.anchors.keep[row, slot] else 0
            own = range(length + slot * size, length + (slot + 1) * size)
            for query in range(slot * size, (slot + 1) * size):
                assert mask[row, 0, query].nonzero()[:, 0].tolist() == [*range(context), *own]
    mod = block_mask_mod(context_limits(data.anchors, data.lengths), length, size)
    rows, query, key = torch.meshgrid(
        torch.arange(shape["rows"]), torch.arange(queries), torch.arange(length + queries), indexing="ij"
    )
    assert torch.equal(mod(rows, torch.zeros_like(rows), query, key), mask[:, 0])


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_and_dense_forwards_agree():
    # over one 128-wide tile, so that whole tiles are skipped too
    data = batch(5, rows=2, length=150, anchors=40)
    model = drafter(1)
    dense = dense_block_mask(data.anchors, data.lengths, 150, 4)
    flex = flex_block_mask(data.anchors, data.lengths, 150, 4)
    with torch.no_grad():
        wanted = model(data.block_embeddings, data.target_hidden, data.anchors.positions, dense)
        found = model(data.block_embeddings, data.target_hidden, data.anchors.positions, flex)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_nothing_at_or_after_an_anchor_leaks_into_its_block():
    data = batch(11, rows=2, length=16, anchors=8, supervised=1.0)
    size, model = 4, drafter(2)
    mask = dense_block_mask(data.anchors, data.lengths, 16, size)

    def run(embeddings, hidden):
        with torch.no_grad():
            return model(embeddings, hidden, data.anchors.positions, mask)

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


def test_padding_slots_stay_finite():
    data = batch(3, rows=2, length=6, anchors=7, supervised=0.0)
    assert not data.anchors.keep.any()
    mask = dense_block_mask(data.anchors, data.lengths, 6, 4)
    hidden = drafter(0)(data.block_embeddings, data.target_hidden, data.anchors.positions, mask)
    hidden.sum().backward()
    assert hidden.isfinite().all()
