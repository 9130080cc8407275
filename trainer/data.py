"""Training rows: reading, checking, padding to static shapes, and the order in which workers see them."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from torch import Tensor

from trainer.anchors import SPECFORGE, AnchorRule
from trainer.errors import InputError

_NAMED_ROWS = 20
_SCAN_ROWS = 2048

log = logging.getLogger(__name__)
datasets.disable_progress_bars()


@dataclass(frozen=True)
class Rows:
    """A padded batch on the CPU: `input_ids` long [N, S], `loss_mask` bool [N, S], `lengths` long [N]."""

    row_ids: tuple[int, ...]
    input_ids: Tensor
    loss_mask: Tensor
    lengths: Tensor


@dataclass(frozen=True)
class HeldOut:
    """One sequence that is never trained on: a prompt and the target's own answer, as token ids."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


def named_rows(rows: Sequence[int]) -> str:
    """Row numbers for a message, at most twenty of them."""
    shown = ", ".join(str(row) for row in rows[:_NAMED_ROWS])
    return shown if len(rows) <= _NAMED_ROWS else f"{shown} and {len(rows) - _NAMED_ROWS} more"


class TrainingData:
    """A `datasets.load_from_disk` folder with `input_ids` and `loss_mask`, scanned once.

    `rows` are the ids that can be trained on: rows without an anchor that is eligible by `rule` are left out, counted
    and named in the log. Rows longer than the largest bucket are cut at its length, and counted. `hold_out` keeps that
    many rows at the end out of training; the first `trainable` ones are not held out.
    """

    def __init__(
        self,
        path: Path,
        buckets: Sequence[int],
        pad_id: int,
        *,
        where: str,
        hold_out: int = 0,
        rule: AnchorRule = SPECFORGE,
    ) -> None:
        self._dataset = _open(path, where)
        self._buckets = tuple(buckets)
        self._pad_id = pad_id
        self._where = where
        total = len(self._dataset)
        if hold_out >= total:
            raise InputError(
                f"{hold_out} of {total} rows are held out: none is left to train on",
                "training.evaluation_prompts",
                f"give less than {total}",
            )
        longest = self._buckets[-1]
        lengths, eligible, self.largest_id = _scan(self._dataset, longest, where, rule)
        self.trainable = trainable = total - hold_out
        self.held_out_rows = tuple(range(trainable, total))
        self.rows = tuple(int(row) for row in np.flatnonzero(eligible[:trainable]))
        self.too_short = tuple(int(row) for row in np.flatnonzero(~eligible[:trainable]))
        self.cut = tuple(int(row) for row in np.flatnonzero(lengths[:trainable] > longest))
        self._lengths = np.minimum(lengths, longest)
        if self.too_short:
            log.warning(
                "%d of %d rows have no eligible anchor and are left out: rows %s",
                len(self.too_short),
                trainable,
                named_rows(self.too_short),
            )
        if self.cut:
            log.warning(
                "%d of %d rows are longer than the largest bucket (%d) and are cut: rows %s",
                len(self.cut),
                trainable,
                longest,
                named_rows(self.cut),
            )
        if not self.rows:
            raise InputError(
                f"none of {trainable} rows has a token within {longest} that can be an anchor ({rule})",
                where,
                "give longer answers, a larger last bucket in workload.buckets, or anchor_eligibility specforge",
            )

    def rows_with_token(self, token: int) -> list[int]:
        """Ids of the rows (also held-out ones) in which `token` occurs, for the check of the mask token."""
        found: list[int] = []
        for start, table in _tables(self._dataset):
            flat, offsets = _flat(table.column("input_ids"))
            hits = np.flatnonzero(flat == token)
            found += sorted({int(row) + start for row in np.searchsorted(offsets, hits, side="right") - 1})
        return found

    def length(self, row: int) -> int:
        """Tokens of a row, cut at the largest bucket."""
        return int(self._lengths[row])

    def digest(self) -> str:
        """Hex digest of the token ids of the `trainable` rows, each cut at the largest bucket."""
        digest = hashlib.sha256()
        for start, table in _tables(self._dataset):
            flat, offsets = _flat(table.column("input_ids"))
            for row in range(start, min(self.trainable, start + len(offsets) - 1)):
                first, length = offsets[row - start], self.length(row)
                digest.update(length.to_bytes(8, "little") + flat[first : first + length].astype("<i8").tobytes())
        return digest.hexdigest()

    def bucket(self, length: int) -> int:
        """The smallest bucket that holds `length` tokens."""
        return next(each for each in self._buckets if each >= length)

    def longest_rows(self, count: int) -> tuple[int, ...]:
        """Ids of the longest trainable rows, longest first, ties by id."""
        return tuple(sorted(self.rows, key=lambda row: (-int(self._lengths[row]), row))[:count])

    def collate(self, row_ids: Sequence[int]) -> Rows:
        """Rows padded on the right to the smallest bucket that holds the longest of them."""
        lengths = torch.tensor([int(self._lengths[row]) for row in row_ids], dtype=torch.long)
        size = self.bucket(int(lengths.max()))
        input_ids = torch.full((len(row_ids), size), self._pad_id, dtype=torch.long)
        loss_mask = torch.zeros((len(row_ids), size), dtype=torch.bool)
        for index, row in enumerate(row_ids):
            item, length = self._dataset[int(row)], int(lengths[index])
            input_ids[index, :length] = torch.tensor(item["input_ids"][:length], dtype=torch.long)
            loss_mask[index, :length] = torch.tensor(item["loss_mask"][:length], dtype=torch.bool)
        return Rows(tuple(int(row) for row in row_ids), input_ids, loss_mask, lengths)

    def held_out(self) -> list[HeldOut]:
        """The held-out rows, each split before its first supervised token (rows without one are left out)."""
        found: list[HeldOut] = []
        for row in self.held_out_rows:
            item = self._dataset[row]
            mask = list(item["loss_mask"])
            start = mask.index(1) if 1 in mask else 0
            if start:
                ids = [int(each) for each in item["input_ids"]]
                found.append(HeldOut(tuple(ids[:start]), tuple(ids[start:])))
        return found


def collate_held_out(items: Sequence[HeldOut], size: int, pad_id: int) -> Rows:
    """Held-out sequences padded (and cut) to `size` tokens; the answers are supervised."""
    lengths = torch.tensor([min(size, len(each.prompt) + len(each.answer)) for each in items], dtype=torch.long)
    input_ids = torch.full((len(items), size), pad_id, dtype=torch.long)
    loss_mask = torch.zeros((len(items), size), dtype=torch.bool)
    for index, each in enumerate(items):
        length = int(lengths[index])
        input_ids[index, :length] = torch.tensor((*each.prompt, *each.answer)[:length], dtype=torch.long)
        loss_mask[index, len(each.prompt) : length] = True
    return Rows(tuple(range(len(items))), input_ids, loss_mask, lengths)


def open_folder(path: Path, where: str) -> Any:
    """A folder of `save_to_disk`, not its splits. Raises `InputError`."""
    try:
        dataset = datasets.load_from_disk(str(path))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise InputError(
            f"{path} is no dataset", where, "give a folder written by datasets.Dataset.save_to_disk"
        ) from error
    if isinstance(dataset, datasets.DatasetDict):
        raise InputError(
            f"{path} holds splits", where, f"give one of its folders: {', '.join(f'{path}/{each}' for each in dataset)}"
        )
    return dataset


def holds_messages(path: Path, where: str) -> bool:
    """Whether a dataset has conversations (a column `messages`) and not token ids. Raises `InputError`."""
    columns = open_folder(path, where).column_names
    return "messages" in columns and "input_ids" not in columns


def _open(path: Path, where: str) -> Any:
    dataset = open_folder(path, where)
    for column in ("input_ids", "loss_mask"):
        if column not in dataset.column_names:
            raise InputError(
                f"the dataset has no column {column!r} but {', '.join(dataset.column_names)}",
                where,
                "give the columns input_ids and loss_mask, or messages",
            )
    return dataset.select_columns(["input_ids", "loss_mask"])


def _tables(dataset: Any) -> Any:
    plain = dataset.with_format("arrow")
    for start in range(0, len(dataset), _SCAN_ROWS):
        yield start, plain[start : start + _SCAN_ROWS]


def _flat(column: Any) -> tuple[np.ndarray, np.ndarray]:
    """All values of a list column in one array, and where each row starts (one more entry than rows)."""
    sizes = np.asarray(column.combine_chunks().value_lengths().fill_null(0).to_numpy(zero_copy_only=False))
    values = np.asarray(column.combine_chunks().flatten().to_numpy(zero_copy_only=False)).astype(np.int64)
    return values, np.concatenate([[0], np.cumsum(sizes)])


def _scan(dataset: Any, longest: int, where: str, rule: AnchorRule) -> tuple[np.ndarray, np.ndarray, int]:
    """Length [rows], whether an eligible anchor exists within `longest` tokens [rows], and the largest token id."""
    lengths: list[np.ndarray] = []
    eligible: list[np.ndarray] = []
    largest = 0
    for start, table in _tables(dataset):
        ids, offsets = _flat(table.column("input_ids"))
        mask, mask_offsets = _flat(table.column("loss_mask"))
        if not np.array_equal(offsets, mask_offsets):
            row = start + int(np.flatnonzero(np.diff(offsets) != np.diff(mask_offsets))[0])
            raise InputError(
                f"row {row} has input_ids and loss_mask of different lengths", where, "make them equally long"
            )
        if len(ids) and ids.min() < 0:
            raise InputError("a token id is negative", where, "give token ids of the target's vocabulary")
        largest = max(largest, int(ids.max()) if len(ids) else 0)
        place = np.arange(len(mask))
        ends = np.repeat(offsets[:-1] + np.minimum(np.diff(offsets), longest), np.diff(offsets))
        # as anchors.eligible_anchors, over all rows at once
        before = np.concatenate([[0], np.cumsum(mask != 0)])
        labels = before[np.minimum(place + 1 + rule.horizon, ends)] - before[np.minimum(place + 1, ends)]
        anchors = (mask != 0) & (labels > 0) & (place + rule.room < ends)
        counts = np.concatenate([[0], np.cumsum(anchors)])
        lengths.append(np.diff(offsets))
        eligible.append(counts[offsets[1:]] > counts[offsets[:-1]])
    return np.concatenate(lengths), np.concatenate(eligible), largest
