"""A run's figures: `metrics.ndjson`, as docs/trainer-contract.md describes it, and the same as TensorBoard's events."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from types import TracebackType

from trainer.tensorboard import ScalarBoard

METRICS, TENSORBOARD = "metrics.ndjson", "tensorboard"


class Metrics:
    """Appends to the files below `out`, whole lines and whole events, each written with one call.

    A torn last line (a killed run) is ended first.
    """

    def __init__(self, out: Path) -> None:
        path = out / METRICS
        self._lock = threading.Lock()
        torn = path.exists() and path.stat().st_size > 0 and not path.read_bytes().endswith(b"\n")
        self._stream = path.open("ab", buffering=0)
        if torn:
            self._stream.write(b"\n")
        self._board = ScalarBoard(out / TENSORBOARD)

    def write(self, kind: str, step: int, **fields: object) -> None:
        """One record. NaN and infinity are refused (they are not JSON)."""
        now = round(time.time(), 3)
        record = {"v": 1, "kind": kind, "time": now, "step": step, **fields}
        line = json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n"
        with self._lock:
            self._stream.write(line.encode())
            self._board.write(kind, now, step, fields)

    def __enter__(self) -> Metrics:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stream.close()
        self._board.close()
