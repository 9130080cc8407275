"""What the canary found: checks, one outcome over all, `evidence.json`."""

from __future__ import annotations

import contextlib
import enum
import logging
import math
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from trainer.files import write_json
from trainer.settings import CONTRACT

log = logging.getLogger(__name__)


class Outcome(str, enum.Enum):
    """Of a check; of the whole canary only pass, fail and inconclusive."""

    PASS = "pass"  # noqa: S105 -- not a password
    WARN = "warn"
    FAIL = "fail"
    INCONCLUSIVE = "inconclusive"
    NOT_CHECKED = "not_checked"


EXIT_CODES = {Outcome.PASS: 0, Outcome.FAIL: 6, Outcome.INCONCLUSIVE: 7}


@dataclass(frozen=True)
class Check:
    """One finding. `worker` is the drafter's index, None for a check of the whole; `figures` are finite numbers.

    `broken`: the check itself could not run, which says nothing of what it checks.
    """

    id: str
    worker: int | None
    outcome: Outcome
    summary: str
    figures: Mapping[str, float] = field(default_factory=dict)
    broken: bool = False

    def to_json(self) -> dict[str, Any]:
        """As docs/trainer-contract.md has it; a figure that is no number is left out, since JSON has none."""
        return {
            "id": self.id,
            "worker": self.worker,
            "outcome": self.outcome.value,
            "summary": self.summary,
            "figures": {name: value for name, value in self.figures.items() if math.isfinite(value)},
        }


class Evidence:
    """Collects checks; several threads may add. `evidence.json` is written once, by whoever comes first.

    `about`: what it says besides, as docs/trainer-contract.md has it.
    """

    def __init__(self, out: Path, about: Mapping[str, object] = MappingProxyType({})) -> None:
        self._path = out / "evidence.json"
        self._lock = threading.Lock()
        self._started = time.monotonic()
        self._checks: list[Check] = []
        self._written: Outcome | None = None
        self._about = about
        self._seconds: dict[str, float] = {}

    def add(self, check: Check) -> None:
        """Keep a finding, and say it in the log."""
        with self._lock:
            self._checks.append(check)
        who = "" if check.worker is None else f" drafter {check.worker}"
        log.info("canary %s%s: %s: %s", check.id, who, check.outcome.value, check.summary)

    @contextlib.contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """How long the block takes, in the log and as the figure `PART_seconds`."""
        started = time.monotonic()
        try:
            yield
        finally:
            self._seconds[f"{part}_seconds"] = seconds = round(time.monotonic() - started, 3)
            log.info("canary: the %s took %.1f s", part, seconds)

    @contextlib.contextmanager
    def blaming_process(self, why: str) -> Iterator[None]:
        """A process that dies within the block leaves an `evidence.json` that asks for another process, for `why`.

        Nothing is written where a check has failed: then its death is one more.
        """
        if self.outcome is not Outcome.FAIL:
            checks = [check.to_json() for check in self.checks]
            told = {"outcome": Outcome.INCONCLUSIVE.value, "summary": why, "again": why, "checks": checks}
            write_json(self._path, {"contract": CONTRACT, **told, **self._about, "figures": {}})
        try:
            yield
        finally:
            self._path.unlink(missing_ok=True)

    @property
    def checks(self) -> list[Check]:
        """The findings so far."""
        with self._lock:
            return list(self._checks)

    @property
    def outcome(self) -> Outcome:
        """Fail before inconclusive before pass; a warning passes, and what was not checked counts for nothing."""
        found = {check.outcome for check in self.checks}
        for outcome in (Outcome.FAIL, Outcome.INCONCLUSIVE):
            if outcome in found:
                return outcome
        return Outcome.PASS if found & {Outcome.PASS, Outcome.WARN} else Outcome.INCONCLUSIVE

    def write(self, passed: str) -> int:
        """Write the file (last of all) and return the exit code. `passed` is the summary when nothing is wrong."""
        outcome, checks = self.outcome, self.checks
        worst = next((check for check in checks if check.outcome is outcome), None)
        warned = sorted({check.id for check in checks if check.outcome is Outcome.WARN})
        summary = passed + (f"; warned: {', '.join(warned)}" if warned else "")
        if outcome is not Outcome.PASS and worst is not None:
            who = "" if worst.worker is None else f" (drafter {worst.worker})"
            summary = f"{worst.id}{who}: {worst.summary.strip().splitlines()[-1]}"
        again = {"again": summary} if outcome is Outcome.INCONCLUSIVE and _only_broken(checks) else {}
        with self._lock:
            if self._written is None:
                seconds = round(time.monotonic() - self._started, 3)
                value = {
                    "contract": CONTRACT,
                    "outcome": outcome.value,
                    "summary": summary,
                    "checks": [check.to_json() for check in checks],
                    **self._about,
                    **again,
                    "figures": {"seconds": seconds, **self._seconds},
                }
                write_json(self._path, value)
                self._written = outcome
            return EXIT_CODES[self._written]


def _only_broken(checks: Sequence[Check]) -> bool:
    undecided = [check for check in checks if check.outcome is Outcome.INCONCLUSIVE]
    return bool(undecided) and all(check.broken for check in undecided)
