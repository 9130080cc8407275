"""Who sees whom: the dense mask against the four rules, flex attention's against the dense one, and no leaks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from tests.trainer.drafting import batch, drafter, generator
from trainer.block_mask import FlexMask, block_mask_mod, context_limits, dense_block_mask
from trainer.compile import CompileLog

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
    flex = FlexMask(150, 4, 40, torch.device("cpu"))(context_limits(data.anchors, data.lengths))
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


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    rows=st.integers(1, 3),
    length=st.sampled_from([1, 7, 127, 128, 129, 200, 256, 300]),
    block_size=st.sampled_from([2, 3, 8, 10, 16, 128, 130]),
    slots=st.integers(1, 12),
)
def test_the_closed_form_mask_is_what_flex_attention_makes_itself(seed, rows, length, block_size, slots):
    draw = generator(seed)
    limits = torch.randint(0, length + 1, (rows, slots), generator=draw)
    found = FlexMask(length, block_size, slots, limits.device)(limits)
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


def test_a_mask_of_other_limits_compiles_nothing_again():
    masks = FlexMask(150, 4, 40, torch.device("cpu"))
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
