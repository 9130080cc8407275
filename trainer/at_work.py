"""`at_work.ndjson`: the batch that each drafter is at, for whoever finds the run hanging."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

_LINE = 1024
_MOST = 100
"""Samples that are named; a line has room for them."""


class AtWork:
    """A line of fixed length for each worker, written in place: a system call a step, and nothing to rename or grow."""

    def __init__(self, file: Path) -> None:
        self._file = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)

    def note(self, worker: int, step: int, samples: Sequence[int]) -> None:
        """`worker` begins optimiser step `step` (from 1) on these samples."""
        record = {"worker": worker, "step": step, "samples": list(samples[:_MOST])}
        line = json.dumps(record, separators=(",", ":")).ljust(_LINE - 1) + "\n"
        os.pwrite(self._file, line.encode(), worker * _LINE)

    def close(self) -> None:
        """Nothing is at work any more. The file stays as it is."""
        os.close(self._file)
