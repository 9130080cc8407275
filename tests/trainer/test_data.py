"""Rows: what is left out or cut is named, batches have static shapes, and the order resumes from one number."""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.anchors import anchor_rule, eligible_anchors
from trainer.data import TrainingData, collate_held_out
from trainer.errors import InputError
from trainer.sampler import FixedOrder, Sampler, Schedule

pytestmark = pytest.mark.torch

ROWS = [
    ([5, 6, 7, 8], [0, 0, 1, 1]),
    ([5, 6], [0, 1]),  # one supervised token: no anchor
    (list(range(10, 22)), [0] * 4 + [1] * 8),  # longer than the largest bucket
    (list(range(10, 22)), [0] * 8 + [1] * 4),  # supervised only where it is cut
    ([5, 6, 7, 8, 9], [1, 0, 1, 0, 1]),  # never two in a row
    ([9, 8, 7], [0, 1, 1]),
]


def save(path: Path, rows: list[tuple[list[int], list[int]]]) -> Path:
    datasets.Dataset.from_dict(
        {"input_ids": [ids for ids, _ in rows], "loss_mask": [mask for _, mask in rows]}
    ).save_to_disk(str(path))
    return path


def load(path: Path, **options: Any) -> TrainingData:
    return TrainingData(path, (4, 8), 0, where="training.data", **options)


def test_rows_without_an_anchor_are_named_and_long_ones_cut(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        data = load(save(tmp_path / "d", ROWS))
    assert data.rows == (0, 2, 5)
    assert data.too_short == (1, 3, 4)
    assert data.cut == (2, 3)
    assert "3 of 6 rows have no eligible anchor and are left out: rows 1, 3, 4" in caplog.text
    assert "2 of 6 rows are longer than the largest bucket (8) and are cut: rows 2, 3" in caplog.text


@settings(max_examples=15, deadline=None)
@given(
    rows=st.lists(st.lists(st.booleans(), min_size=1, max_size=12), min_size=1, max_size=6),
    size=st.integers(2, 5),
    name=st.sampled_from(["specforge", "torchspec", "speculators"]),
)
def test_the_rows_that_are_kept_are_those_in_which_an_anchor_can_be_drawn(
    rows: list[list[bool]], size: int, name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    rule, always = anchor_rule(name, size), [True] * 8
    path = save(
        tmp_path_factory.mktemp("d"), [([1] * len(row), [int(each) for each in row]) for row in [*rows, always]]
    )
    kept = []
    for index, row in enumerate([*rows, always]):
        cut = torch.tensor([row[:8]])
        if eligible_anchors(cut, torch.tensor([cut.shape[1]]), rule).any():
            kept.append(index)
    assert load(path, rule=rule).rows == tuple(kept)


def test_batches_are_padded_to_the_smallest_bucket(tmp_path: Path) -> None:
    data = load(save(tmp_path / "d", ROWS))
    small = data.collate([0, 5])
    assert small.input_ids.tolist() == [[5, 6, 7, 8], [9, 8, 7, 0]]
    assert small.loss_mask.tolist() == [[False, False, True, True], [False, True, True, False]]
    assert small.lengths.tolist() == [4, 3]
    cut = data.collate([2])
    assert cut.input_ids.tolist() == [list(range(10, 18))]
    assert cut.loss_mask.sum() == 4


def test_longest_rows_first(tmp_path: Path) -> None:
    assert load(save(tmp_path / "d", ROWS)).longest_rows(2) == (2, 0)


def test_held_out_rows_are_the_last_and_never_trained_on(tmp_path: Path) -> None:
    data = load(save(tmp_path / "d", ROWS), hold_out=1)
    assert 5 not in data.rows
    (item,) = data.held_out()
    assert (item.prompt, item.answer) == ((9,), (8, 7))
    batch = collate_held_out([item], 8, 0)
    assert batch.input_ids.tolist() == [[9, 8, 7, 0, 0, 0, 0, 0]]
    assert batch.loss_mask[0].tolist() == [False, True, True] + [False] * 5


def test_where_a_token_occurs(tmp_path: Path) -> None:
    data = load(save(tmp_path / "d", ROWS))
    assert data.rows_with_token(9) == [4, 5]
    assert data.rows_with_token(21) == [2, 3]
    assert data.rows_with_token(40) == []
    assert data.largest_id == 21


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"input_ids": [[1, 2]]}, "no column 'loss_mask'"),
        ({"input_ids": [[1, 2], [1, 2, 3]], "loss_mask": [[1, 1], [1, 1]]}, "row 1 has"),
        ({"input_ids": [[1, 2]], "loss_mask": [[0, 1]]}, "none of 1 rows has a token within 8"),
        ({"input_ids": [[1, -2]], "loss_mask": [[1, 1]]}, "negative"),
    ],
)
def test_bad_data_is_refused(tmp_path: Path, columns: dict[str, list[list[int]]], said: str) -> None:
    datasets.Dataset.from_dict(columns).save_to_disk(str(tmp_path / "d"))
    with pytest.raises(InputError, match=said):
        load(tmp_path / "d")


def test_a_folder_that_is_no_dataset(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is no dataset"):
        load(tmp_path / "nothing")


@given(
    rows=st.integers(1, 40),
    workers=st.integers(1, 4),
    accumulation=st.integers(1, 3),
    batch=st.integers(1, 3),
    seed=st.integers(0, 5),
)
def test_every_row_once_an_epoch_and_no_row_twice_in_a_step(
    rows: int, workers: int, accumulation: int, batch: int, seed: int
) -> None:
    schedule = Schedule(workers, accumulation, batch)
    ids = list(range(100, 100 + rows))
    sampler = Sampler(ids, seed, schedule)
    steps = 3 * rows // schedule.samples_per_step + 2
    stream = [
        row
        for step in range(steps)
        for micro in range(accumulation)
        for worker in range(workers)
        for row in sampler.rows_for(step, micro, worker)
    ]
    for epoch in range(len(stream) // rows):
        assert Counter(stream[epoch * rows : (epoch + 1) * rows]) == Counter(ids)
    first = stream[: schedule.samples_per_step]
    if schedule.samples_per_step <= rows:
        assert len(set(first)) == len(first)


def test_order_continues_from_a_position_also_with_other_workers() -> None:
    two, three = Schedule(2, 1, 2), Schedule(3, 1, 1)
    whole = Sampler(range(11), 7, two)
    stream = [row for step in range(30) for worker in range(2) for row in whole.rows_for(step, 0, worker)]
    position = whole.position_after(5)
    again = Sampler(range(11), 7, two, start=position, first_step=5)
    assert [again.rows_for(step, 0, 1) for step in range(5, 12)] == [
        whole.rows_for(step, 0, 1) for step in range(5, 12)
    ]
    other = Sampler(range(11), 7, three, start=position, first_step=5)
    assert [row for step in range(5, 8) for worker in range(3) for row in other.rows_for(step, 0, worker)] == stream[
        position : position + 9
    ]


def test_seeds_and_epochs_differ() -> None:
    schedule = Schedule(1, 1, 20)
    first = Sampler(range(20), 0, schedule)
    assert first.rows_for(0, 0, 0) != first.rows_for(1, 0, 0)
    assert first.rows_for(0, 0, 0) != Sampler(range(20), 1, schedule).rows_for(0, 0, 0)


def test_fixed_order_repeats() -> None:
    order = FixedOrder([3, 1], Schedule(2, 1, 1))
    assert [order.rows_for(step, 0, worker) for step in range(2) for worker in range(2)] == [[3], [1], [3], [1]]
