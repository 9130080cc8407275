"""The target's hidden states of the training rows on disk: what a set of them is of, and how it is read.

`hidden_states/` of a prepared folder has shards of safetensors, in each the states [L, K*D] of rows that follow each
other, named by row number, and `index.json`: what the set was made from, and of each shard its size, its first row, and
each row's length and digest. `hidden_states_writer` writes it; a set without an index does not exist.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from trainer.assets import resolve_asset
from trainer.data import Rows, TrainingData
from trainer.dflash_model import DrafterConfig
from trainer.errors import InputError
from trainer.placement import DTYPES
from trainer.settings import Settings
from trainer.target_files import target_identity

FOLDER, INDEX = "hidden_states", "index.json"
_WHERE = "settings.prepared"


@dataclass(frozen=True)
class Origin:
    """What a set is made from: it is used only where all of it is the run's own.

    `rows` and `tokens` are counted without what is held out; `input_ids` is the digest of their token ids. `buckets`:
    each row is computed alone, padded to its own, which a CPU or GPU may show in the last bit.
    """

    target: str
    target_layer_ids: tuple[int, ...]
    hidden_size: int
    dtype: str
    buckets: tuple[int, ...]
    rows: int
    tokens: int
    input_ids: str

    @property
    def width(self) -> int:
        """Numbers a token, K*D."""
        return len(self.target_layer_ids) * self.hidden_size

    @property
    def token_bytes(self) -> int:
        """Bytes a token takes on disk."""
        return self.width * DTYPES[self.dtype].itemsize

    @property
    def bytes(self) -> int:
        """Bytes of all states: tokens x layers x hidden size x bytes of a number."""
        return self.tokens * self.token_bytes


def token_bytes(settings: Settings, drafter: DrafterConfig) -> int:
    """Bytes that a token's hidden states take on disk, before there are rows."""
    return len(drafter.target_layer_ids) * drafter.hidden_size * DTYPES[settings.workload.target_dtype].itemsize


def origin_of(settings: Settings, drafter: DrafterConfig, data: TrainingData) -> Origin:
    """What the set for these settings and rows is made from."""
    work = settings.workload
    return Origin(
        target=target_identity(resolve_asset(work.target, "workload.target")),
        target_layer_ids=drafter.target_layer_ids,
        hidden_size=drafter.hidden_size,
        dtype=work.target_dtype,
        buckets=work.buckets,
        rows=data.trainable,
        tokens=sum(data.length(row) for row in range(data.trainable)),
        input_ids=data.digest(),
    )


@dataclass(frozen=True)
class Shard:
    """One file. `lengths` (tokens) and `sha256` (of the states' bytes) are those of its rows, from `first_row` on."""

    path: str
    size: int
    first_row: int
    lengths: tuple[int, ...]
    sha256: tuple[str, ...]


def states_digest(states: Tensor) -> str:
    """Hex digest of the bytes of contiguous states."""
    return hashlib.sha256(states.view(torch.uint8).numpy().data).hexdigest()


def index_of(origin: Origin, shards: Sequence[Shard]) -> dict[str, Any]:
    """The content of `index.json`."""
    return {"v": 1, "kind": "hidden_states", **asdict(origin), "shards": [asdict(each) for each in shards]}


class HiddenStates:
    """A set, read: a source of features in place of the target's forward. Safe for several threads at once.

    Files are mapped into memory and only looked at where a batch needs them. A row's digest is checked the first time
    that this object reads it, the size of every file when it is opened.
    """

    device = torch.device("cpu")

    def __init__(self, folder: Path, origin: Origin, shards: Sequence[Shard]) -> None:
        self._folder = folder
        self._origin = origin
        self._shards = tuple(shards)
        self._first_rows = [each.first_row for each in shards]
        self._checked: set[int] = set()

    @classmethod
    def open(cls, prepared: Path, wanted: Origin) -> HiddenStates:
        """The set of a prepared folder. Raises `InputError` where it is not there, of something else, or damaged."""
        folder = prepared / FOLDER
        origin, shards = _read_index(folder / INDEX)
        _refuse_other(origin, wanted, folder)
        found = cls(folder, origin, shards)
        for shard in shards:
            path = folder / shard.path
            size = path.stat().st_size if path.is_file() else None
            if size != shard.size:
                raise found._damaged(shard, "it is not there" if size is None else f"{size} bytes, not {shard.size}")
        return found

    def features_of(self, rows: Rows) -> Tensor:
        """Hidden states of the rows on the CPU, [N, S, K*D] in the target's dtype, zero from each row's length on."""
        features = torch.zeros((*rows.input_ids.shape, self._origin.width), dtype=DTYPES[self._origin.dtype])
        for index, row in enumerate(rows.row_ids):
            length = int(rows.lengths[index])
            features[index, :length] = self._states(row, length)
        return features

    def _states(self, row: int, length: int) -> Tensor:
        shard = self._shards[bisect_right(self._first_rows, row) - 1]
        try:
            with safe_open(self._folder / shard.path, framework="pt") as stored:
                states: Tensor = stored.get_tensor(str(row))
        except (SafetensorError, OSError) as error:
            raise self._damaged(shard, f"row {row} cannot be read: {error}") from error
        if states.shape != (length, self._origin.width) or states.dtype != DTYPES[self._origin.dtype]:
            raise self._damaged(shard, f"row {row} is {tuple(states.shape)} of {states.dtype}")
        if row not in self._checked:
            if states_digest(states) != shard.sha256[row - shard.first_row]:
                raise self._damaged(shard, f"row {row} has not the digest that the index gives")
            self._checked.add(row)
        return states

    def _damaged(self, shard: Shard, what: str) -> InputError:
        return InputError(
            f"hidden states are damaged: {what}",
            str(self._folder / shard.path),
            f"delete {self._folder.parent} and prepare the data again",
        )


def _read_index(path: Path) -> tuple[Origin, list[Shard]]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        origin = Origin(**{each.name: _frozen(value[each.name]) for each in fields(Origin)})
        shards = [Shard(**{name: _frozen(item) for name, item in each.items()}) for each in value["shards"]]
    except FileNotFoundError as error:
        raise InputError(
            f"{path.parent.parent} has no hidden states",
            _WHERE,
            "run prepare with workload.hidden_states: offline, or set it to online",
        ) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"cannot read: {error}", str(path), "prepare the data again") from error
    return origin, shards


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


_SPOKEN = {
    "target": "target model",
    "rows": "number of rows",
    "tokens": "number of tokens",
    "input_ids": "token ids of the rows",
}


def _refuse_other(found: Origin, wanted: Origin, folder: Path) -> None:
    differ = []
    for name, value in asdict(wanted).items():
        other = getattr(found, name)
        if other == value:
            continue
        # nobody can read a digest
        shown = "" if name in ("target", "input_ids") else f" ({_shown(other)} on disk, {_shown(value)} wanted)"
        differ.append(f"{_SPOKEN.get(name, name)}{shown}")
    if differ:
        raise InputError(
            f"the hidden states of {folder} are of something else, by their {', '.join(differ)}",
            _WHERE,
            "prepare the data again with these settings, or give the settings that it was prepared with",
        )


def _shown(value: object) -> str:
    return str(list(value)) if isinstance(value, tuple) else str(value)
