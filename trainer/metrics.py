"""`metrics.ndjson`: one JSON object a line, as docs/trainer-contract.md describes them."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from types import TracebackType


class MetricsFile:
    """Appends whole lines, each written with one call. A torn last line (a killed run) is ended first."""

    def __init__(self, path: Path) -> None:
        self._lock = threading.Lock()
        torn = path.exists() and path.stat().st_size > 0 and not path.read_bytes().endswith(b"\n")
        self._stream = path.open("ab", buffering=0)
        if torn:
            self._stream.write(b"\n")

    def write(self, kind: str, step: int, **fields: object) -> None:
        """One record. NaN and infinity are refused (they are not JSON)."""
        record = {"v": 1, "kind": kind, "time": round(time.time(), 3), "step": step, **fields}
        line = json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n"
        with self._lock:
            self._stream.write(line.encode())

    def __enter__(self) -> MetricsFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stream.close()
