"""`at_work.ndjson`: what each drafter has begun."""

from __future__ import annotations

import json
import threading
from pathlib import Path


class AtWork:
    """The file is written anew at each step of each worker; a reader may see a line that is not whole."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="utf-8")
        self._lock = threading.Lock()
        self._lines: dict[int, str] = {}

    def note(self, worker: int, step: int, samples: list[int]) -> None:
        """`worker` begins step `step` (from 1) on these samples."""
        with self._lock:
            self._lines[worker] = json.dumps({"worker": worker, "step": step, "samples": samples}) + "\n"
            self._file.seek(0)
            self._file.write("".join(self._lines[each] for each in sorted(self._lines)))
            self._file.truncate()
            self._file.flush()
