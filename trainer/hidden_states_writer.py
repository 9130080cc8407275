"""Writes the hidden states of all training rows, a shard at a time, each whole or absent.

What is done is in a journal: a writer that was killed goes on behind the last whole shard, to the same files.
"""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from trainer.abort import Abort
from trainer.data import TrainingData
from trainer.errors import InputError
from trainer.files import fsync_dir, fsync_file, write_json
from trainer.hidden_states import FOLDER, INDEX, Origin, Shard, index_of, states_digest
from trainer.journal import JournalFile
from trainer.parts import available_cpus, load_targets
from trainer.placement import place
from trainer.progress import Progress
from trainer.settings import Settings
from trainer.target import Target
from trainer.workers import Worker

JOURNAL = "hidden_states.ndjson"
_SHARD_BYTES = 1 << 29
"""A shard is held in memory, by each device, until it is whole; one longer row is a shard too."""
_SHARD_ROWS = 1024
"""A file's header names each row, and is read each time that a row is."""
_JOIN_LOOK_S = 0.5

log = logging.getLogger(__name__)


def write_hidden_states(settings: Settings, key: str, origin: Origin, data: TrainingData, out: Path) -> None:
    """Write `hidden_states/` into `out`, gone on from what the journal of the data's `key` says is there; the
    journal stays, for who knows when all is whole.

    One thread for each device of a target worker. Raises `InputError` where there is no room, and `WorkerFailed`.
    """
    work = _Work(key, origin, data, out)
    try:
        work.refuse_without_room()
        if not work.is_done:
            _write(settings, origin, work)
        write_json(out / FOLDER / INDEX, index_of(origin, work.shards()))
    finally:
        work.close()


def _write(settings: Settings, origin: Origin, work: _Work) -> None:
    placement = place(settings.workload, torch.cuda.device_count())
    targets = load_targets(settings, placement, origin.target_layer_ids)
    abort = Abort()
    threads = max(1, available_cpus() // len(targets))
    writers = [_Writer(index, target, work, threads, abort) for index, target in enumerate(targets.values())]
    for writer in writers:
        writer.start()
    for writer in writers:
        # short joins: signal handlers run in this thread between them
        while writer.is_alive():
            writer.join(_JOIN_LOOK_S)
    if abort.failure is not None:
        raise abort.failure


class _Work:
    """Which shards there are to be, and which there are. Safe for several threads."""

    def __init__(self, key: str, origin: Origin, data: TrainingData, out: Path) -> None:
        self.data = data
        self._origin = origin
        self.folder = out / FOLDER
        self.folder.mkdir(exist_ok=True)
        lengths = [data.length(row) for row in range(data.trainable)]
        self._lengths = lengths
        self._ranges = shard_ranges(lengths, origin.token_bytes)
        self._done: dict[int, Shard] = {}
        self._journal = JournalFile(out / JOURNAL, key, self._known)
        self._left = iter([number for number in range(len(self._ranges)) if number not in self._done])
        self._lock = threading.Lock()
        self._progress = Progress("rows' hidden states written", origin.rows, self._rows_done)

    @property
    def _rows_done(self) -> int:
        return sum(len(each.lengths) for each in self._done.values())

    @property
    def is_done(self) -> bool:
        """Whether every shard is there."""
        return len(self._done) == len(self._ranges)

    def take(self) -> int | None:
        """The number of a shard that nobody writes yet; None: there is none left."""
        with self._lock:
            return next(self._left, None)

    def rows_of(self, number: int) -> range:
        """The rows of a shard."""
        return self._ranges[number]

    def keep(self, number: int, size: int, digests: Sequence[str]) -> None:
        """A shard is whole on the disk: it is not made again."""
        with self._lock:
            rows = self._ranges[number]
            self._journal.append({"shard": number, "rows": [rows.start, rows.stop], "size": size, "sha256": digests})
            self._add(number, size, digests)
            self._progress.add(len(rows))

    def shards(self) -> list[Shard]:
        """All of them, in the order of their rows."""
        return [self._done[number] for number in range(len(self._ranges))]

    def refuse_without_room(self) -> None:
        """Raise `InputError` where the disk has no room for what is still to be written."""
        rest = self._origin.bytes - sum(self._origin.token_bytes * sum(each.lengths) for each in self._done.values())
        free = shutil.disk_usage(self.folder).free
        each = self._origin.token_bytes
        log.info("hidden states: %d tokens of %d bytes, %s to write", self._origin.tokens, each, _gib(rest))
        if rest > free:
            raise InputError(
                f"the hidden states of {self._origin.tokens} tokens, {each} bytes each, need {_gib(rest)} more, "
                f"and {_gib(free)} are free",
                str(self.folder),
                "make room there, give less data or fewer target_layers, or set workload.hidden_states: online",
            )

    def close(self) -> None:
        """Let the journal go; it stays."""
        self._journal.close()

    def _known(self, line: dict[str, Any]) -> None:
        number = line["shard"]
        path = self.folder / shard_name(number)
        if number >= len(self._ranges) or line["rows"] != [self._ranges[number].start, self._ranges[number].stop]:
            return
        if path.is_file() and path.stat().st_size == line["size"]:
            self._add(number, line["size"], line["sha256"])

    def _add(self, number: int, size: int, digests: Sequence[str]) -> None:
        rows = self._ranges[number]
        lengths = tuple(self._lengths[row] for row in rows)
        self._done[number] = Shard(shard_name(number), size, rows.start, lengths, tuple(digests))


def shard_name(number: int) -> str:
    """The file of a shard."""
    return f"shard-{number:06d}.safetensors"


def shard_ranges(lengths: Sequence[int], token_bytes: int) -> list[range]:
    """The rows of each shard: as many as fit, in order."""
    found: list[range] = []
    first = size = 0
    for row, length in enumerate(lengths):
        more = length * token_bytes
        if row > first and (size + more > _SHARD_BYTES or row - first == _SHARD_ROWS):
            found.append(range(first, row))
            first, size = row, 0
        size += more
    return [*found, range(first, len(lengths))]


class _Writer(Worker):
    """Makes shards with one device's target until none is left."""

    def __init__(self, index: int, target: Target, work: _Work, cpu_threads: int, abort: Abort) -> None:
        super().__init__(f"hidden-states-{index}", target.device, cpu_threads, abort, others=target.devices[1:])
        self._target = target
        self._work = work

    def work(self) -> None:
        """See the class."""
        while (number := self._work.take()) is not None:
            self._abort.check()
            states = {str(row): self._states(row) for row in self._work.rows_of(number)}
            size = _save(self._work.folder / shard_name(number), states)
            self._work.keep(number, size, [states_digest(each) for each in states.values()])

    def _states(self, row: int) -> Tensor:
        """[L, K*D] on the CPU. A row is computed alone: what it was computed with is a matter of the row only."""
        rows = self._work.data.collate([row])
        return self._target.features_of(rows)[0, : int(rows.lengths[0])].to("cpu", copy=True).contiguous()


def _save(path: Path, states: dict[str, Tensor]) -> int:
    """Write a shard, whole or not at all; its size in bytes."""
    part = path.with_suffix(".part")
    try:
        save_file(states, part)
        fsync_file(part)
        part.rename(path)
    except BaseException:
        # a full disk: what is of no use makes room again
        part.unlink(missing_ok=True)
        raise
    fsync_dir(path.parent)
    return path.stat().st_size


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**26 else f"{count / 2**20:.2f} MiB"
