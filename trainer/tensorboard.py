"""TensorBoard event files of a run's scalars, which grow beside `metrics.ndjson`.

An event file is a sequence of records, each an `Event` message of TensorFlow's `core/util/event.proto` in the framing
of its `core/lib/io/record_writer.h`. Only what scalars need is written here: docs/decisions/0019 says why by hand.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

PREFIX = "events.out.tfevents."
_VERSION = "brain.Event:2"
"""With it, readers take a start (below) for the end of what stood there before from that step on."""
_START = 1
_STEP = ("loss", "first_slot_accuracy", "learning_rate", "grad_norm", "queue_depth")
_PIPELINE = (
    "samples_per_s",
    "target_tokens_per_s",
    "drafter_wait",
    "drafter_busy",
    "target_wait",
    "target_busy",
)
_EVALUATION = ("loss", "first_slot_acceptance", "tau")


class ScalarBoard:
    """`train/` and `evaluation/` below `folder`: two curves of one run, so that both losses share a chart.

    Each attempt at a run has files of its own. They begin with a start at the attempt's first step: what an attempt
    that was killed wrote from there on is not shown. Not for several threads at once.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, EventFile] = {}

    def write(self, kind: str, time: float, step: int, fields: Mapping[str, object]) -> None:
        """The scalars of a record of `metrics.ndjson`; of a kind without any, nothing."""
        if kind == "step":
            self._add("train", time, step, dict(_step_scalars(fields)))
        elif kind == "evaluation":
            self._add("evaluation", time, step, dict(_numbers(fields, _EVALUATION)))

    def close(self) -> None:
        """Close the files."""
        for each in self._files.values():
            each.close()

    def _add(self, name: str, time: float, step: int, scalars: Mapping[str, float]) -> None:
        if name not in self._files:
            self._files[name] = EventFile(self._folder / name, time, step)
        self._files[name].add(time, step, scalars)


class EventFile:
    """The next file of `folder`, by number. A record is in the kernel's hands when `add` returns: a kill loses none."""

    def __init__(self, folder: Path, time: float, step: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads a folder's files in the order of their names: a clock that was set back must not matter
        before = [each.name.rpartition(".")[2] for each in folder.glob(f"{PREFIX}*")]
        number = max((int(each) for each in before if each.isdecimal()), default=-1) + 1
        self._stream = (folder / f"{PREFIX}{number:06d}").open("xb")
        self._write(_double(1, time) + _bytes(3, _VERSION.encode()))
        self._write(_double(1, time) + _integer(2, step) + _bytes(7, _integer(1, _START)))

    def add(self, time: float, step: int, scalars: Mapping[str, float]) -> None:
        """One event: `time` in Unix seconds, values by tag (float32 in the file)."""
        values = (_bytes(1, tag.encode()) + _float(2, value) for tag, value in scalars.items())
        summary = b"".join(_bytes(1, value) for value in values)
        self._write(_double(1, time) + _integer(2, step) + _bytes(5, summary))

    def close(self) -> None:
        """Nothing is left to be written."""
        self._stream.close()

    def _write(self, event: bytes) -> None:
        length = struct.pack("<Q", len(event))
        self._stream.write(length + _checksum(length) + event + _checksum(event))
        self._stream.flush()


def _step_scalars(fields: Mapping[str, object]) -> Iterator[tuple[str, float]]:
    yield from _numbers(fields, _STEP)
    pipeline = fields.get("pipeline")
    if isinstance(pipeline, Mapping):
        for name, value in _numbers(pipeline, _PIPELINE):
            yield f"pipeline/{name}", value


def _numbers(fields: Mapping[str, object], names: tuple[str, ...]) -> Iterator[tuple[str, float]]:
    """Those that are there: a held-out loss may be null."""
    for name in names:
        value = fields.get(name)
        if isinstance(value, int | float):
            yield name, value


# ---- the wire format of protocol buffers: a field's number and type, then its value


def _double(field: int, value: float) -> bytes:
    return _varint(field << 3 | 1) + struct.pack("<d", value)


def _float(field: int, value: float) -> bytes:
    return _varint(field << 3 | 5) + struct.pack("<f", value)


def _integer(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _bytes(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    """A number >= 0, seven bits a byte, the lowest first."""
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])


# ---- the framing's checksum: CRC-32C (RFC 3720), masked

_ROWS = 256


def _checksum(data: bytes) -> bytes:
    """Of four bytes at least. The sum is linear: what each byte gives at its place, all in one look."""
    values = np.frombuffer(data, np.uint8).astype(np.intp)
    # the register begins with ones
    values[:4] ^= 0xFF
    shares = _shares(-(-len(data) // _ROWS) * _ROWS)[-len(data) :]
    crc = int(np.bitwise_xor.reduce(shares[np.arange(len(data)), values])) ^ 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


@functools.cache
def _shares(length: int) -> np.ndarray:
    """What a byte adds to the sum [places before the end, the last one last; its value]."""
    last = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        last = last >> 1 ^ np.where(last & 1, np.uint32(0x82F63B78), np.uint32(0))
    rows = [last]
    for _ in range(length - 1):
        rows.append(last[rows[-1] & 0xFF] ^ rows[-1] >> 8)
    return np.stack(rows[::-1])
