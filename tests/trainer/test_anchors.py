"""Which positions become anchors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainer.drafting import generator
from trainer.anchors import anchor_rule, block_token_ids, eligible_anchors, sample_anchors
from trainer.loss import block_labels

pytestmark = pytest.mark.torch


def test_an_anchor_and_its_next_token_are_both_supervised():
    loss_mask = torch.tensor([[0, 1, 1, 0, 1, 1, 1, 1]], dtype=torch.bool)
    # length 7: position 6 has no next token inside the row, position 3 is not supervised, 2's next one is not
    eligible = eligible_anchors(loss_mask, torch.tensor([7]))
    assert eligible[0].nonzero()[:, 0].tolist() == [1, 4, 5]


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        # the whole block of 3 inside the row of 7, and a label behind the anchor
        ("torchspec", [1, 2, 4]),
        # not one of the last 3
        ("speculators", [1, 2]),
        ("specforge", [1, 4, 5]),
    ],
)
def test_public_trainers_rules(name, wanted):
    loss_mask = torch.tensor([[0, 1, 1, 0, 1, 1, 1, 1]], dtype=torch.bool)
    eligible = eligible_anchors(loss_mask, torch.tensor([7]), anchor_rule(name, 3))
    assert eligible[0].nonzero()[:, 0].tolist() == wanted


def test_a_block_without_a_label_is_never_drafted():
    lonely = torch.tensor([[1, 0, 0, 0, 0, 0]], dtype=torch.bool)
    for name in ("specforge", "torchspec", "speculators"):
        assert not eligible_anchors(lonely, torch.tensor([6]), anchor_rule(name, 3)).any(), name


@settings(max_examples=30, deadline=None)
@given(
    st.integers(0, 10_000), st.integers(1, 20), st.integers(2, 6), st.floats(0, 1),
    st.sampled_from(["specforge", "torchspec", "speculators"]),
)  # fmt: skip
def test_every_eligible_anchor_has_a_loss_whatever_the_rule_and_the_padding(seed, length, size, share, name):
    numbers = generator(seed)
    rule = anchor_rule(name, size)
    lengths = torch.randint(1, length + 1, (3,), generator=numbers)
    loss_mask = (torch.rand((3, length), generator=numbers) < share) & (torch.arange(length) < lengths[:, None])
    eligible = eligible_anchors(loss_mask, lengths, rule)
    for row in range(3):
        marks, end = loss_mask[row].tolist(), int(lengths[row])
        for at in range(length):
            # written as the trainers write it, but for the label that is asked for
            allowed = {
                "specforge": at <= end - 2 and marks[at + 1 : at + 2] == [True],
                "torchspec": at <= end - size and any(marks[at + 1 : at + size]),
                "speculators": at < end - size and any(marks[at + 1 : at + size]),
            }[name]
            assert bool(eligible[row, at]) == (marks[at] and allowed), (row, at)
    padded = torch.nn.functional.pad(loss_mask, (0, 9), value=True)
    assert torch.equal(eligible_anchors(padded, lengths, rule)[:, :length], eligible)
    anchors = sample_anchors(loss_mask, lengths, 4, numbers, rule)
    ids = torch.zeros_like(loss_mask, dtype=torch.long)
    _, weights = block_labels(ids, loss_mask, lengths, anchors, size, 2.0)
    assert ((weights.sum(dim=2) > 0) == anchors.keep).all()


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 4), st.integers(1, 20), st.integers(1, 25), st.floats(0, 1))
def test_samples_are_distinct_eligible_and_as_many_as_there_are(seed, rows, length, count, share):
    numbers = generator(seed)
    lengths = torch.randint(1, length + 1, (rows,), generator=numbers)
    loss_mask = torch.rand((rows, length), generator=numbers) < share
    eligible = eligible_anchors(loss_mask, lengths)
    anchors = sample_anchors(loss_mask, lengths, count, numbers)
    assert anchors.positions.shape == anchors.keep.shape == (rows, count)
    assert anchors.positions.dtype == torch.long
    for row in range(rows):
        valid = anchors.positions[row][anchors.keep[row]].tolist()
        assert valid == sorted(set(valid))
        assert len(valid) == min(count, int(eligible[row].sum()))
        assert eligible[row, valid].all()
        padding = anchors.positions[row][~anchors.keep[row]].tolist()
        assert padding == [valid[-1] if valid else 0] * len(padding)
        assert anchors.keep[row].tolist() == [True] * len(valid) + [False] * len(padding)


def test_every_eligible_position_is_equally_likely():
    loss_mask = torch.ones((1, 9), dtype=torch.bool).repeat(4000, 1)
    anchors = sample_anchors(loss_mask, torch.full((4000,), 9), 2, generator(3))
    counts = torch.bincount(anchors.positions.flatten(), minlength=9)
    assert counts[8] == 0
    # 1000 expected each, standard deviation about 27
    assert ((counts[:8] - 1000).abs() < 120).all()


def test_the_generator_alone_decides():
    loss_mask, lengths = torch.ones((2, 30), dtype=torch.bool), torch.tensor([30, 20])
    state = torch.get_rng_state()
    first = sample_anchors(loss_mask, lengths, 6, generator(1))
    torch.manual_seed(99)
    again = sample_anchors(loss_mask, lengths, 6, generator(1))
    other = sample_anchors(loss_mask, lengths, 6, generator(2))
    torch.set_rng_state(state)
    assert torch.equal(first.positions, again.positions)
    assert not torch.equal(first.positions, other.positions)
    sample_anchors(loss_mask, lengths, 6, generator(1))
    assert torch.equal(torch.get_rng_state(), state)


def test_block_tokens_are_the_anchor_and_masks():
    input_ids = torch.tensor([[10, 11, 12, 13, 14]])
    anchors = sample_anchors(torch.ones((1, 5), dtype=torch.bool), torch.tensor([5]), 4, generator(0))
    ids = block_token_ids(input_ids, anchors, 3, 99)
    assert ids.tolist() == [[10, 99, 99, 11, 99, 99, 12, 99, 99, 13, 99, 99]]


def test_no_slots_is_refused():
    with pytest.raises(ValueError, match="at least 1"):
        sample_anchors(torch.ones((1, 5), dtype=torch.bool), torch.tensor([5]), 0, generator(0))
