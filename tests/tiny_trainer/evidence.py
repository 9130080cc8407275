"""What a canary found: checks, one outcome, `evidence.json`."""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from . import files

PASS, FAIL, INCONCLUSIVE, NOT_CHECKED = "pass", "fail", "inconclusive", "not_checked"
EXIT = {PASS: 0, FAIL: 6, INCONCLUSIVE: 7}


@dataclass(frozen=True)
class Check:
    """One finding; `worker` is None for checks of the whole."""

    id: str
    worker: int | None
    outcome: str
    summary: str
    figures: dict[str, float] = field(default_factory=dict)


class Evidence:
    """Collects checks and writes them as one file."""

    def __init__(self, out: Path, strategy: str, tuning: dict[str, Any] | None = None) -> None:
        self._strategy = strategy
        self._tuning = tuning
        self._path = out / "evidence.json"
        self._began = time.monotonic()
        self.checks: list[Check] = []

    def add(self, check: Check) -> None:
        """Keep one finding and say it in the log."""
        self.checks.append(check)
        who = "" if check.worker is None else f" worker {check.worker}"
        print(f"canary: {check.id}{who}: {check.outcome}: {check.summary}", flush=True)

    def distance(self, name: str, worker: int, worst: float, allowed: float, summary: str) -> None:
        """Judge one distance; a value that is not finite is a failure."""
        good = math.isfinite(worst) and worst <= allowed
        figures = {"worst": worst, "tolerance": allowed} if math.isfinite(worst) else {"tolerance": allowed}
        self.add(Check(name, worker, PASS if good else FAIL, summary, figures))

    @property
    def outcome(self) -> str:
        """Fail beats inconclusive beats pass; what was not checked never counts."""
        seen = {check.outcome for check in self.checks}
        return FAIL if FAIL in seen else INCONCLUSIVE if INCONCLUSIVE in seen else PASS

    def write(self, summary: str) -> int:
        """Write the file last of all; returns the exit code that agrees with it."""
        value: dict[str, Any] = {
            "contract": 1,
            "outcome": self.outcome,
            "summary": summary,
            "checks": [asdict(check) for check in self.checks],
            "strategy": self._strategy,
            "tuning": self._tuning,
            "figures": {"seconds": round(time.monotonic() - self._began, 3)},
        }
        files.write_json(self._path, value)
        return EXIT[self.outcome]
