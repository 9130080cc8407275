"""`metrics.ndjson`: one whole line a record, flushed."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any


class Metrics:
    """Appends records; a torn last line of a killed run is ended first."""

    def __init__(self, path: Path) -> None:
        torn = path.exists() and path.stat().st_size and not path.read_bytes().endswith(b"\n")
        self._file = path.open("a", encoding="utf-8")
        if torn:
            self._file.write("\n")

    def write(self, kind: str, step: int, **fields: Any) -> None:
        """Append one record, and say so in the log."""
        record = {"v": 1, "kind": kind, "time": time.time(), "step": step, **fields}
        self._file.write(json.dumps(record, allow_nan=False) + "\n")
        self._file.flush()
        print(f"{kind} at step {step}", flush=True)

    def close(self) -> None:
        """Close the file."""
        self._file.close()
