"""Step time against what the same GPU took before, for the same workload and strategy.

Of each canary that passes, one line is kept in `settings.cache/throughput/<GPU>/<key>.ndjson`. What is compared is the
median of the last ones, so that a slow or a lucky day moves nothing.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

from trainer.canary.evidence import Check, Evidence, Outcome
from trainer.canary.timing import Timing, time_steps
from trainer.machine import uuid_of
from trainer.parts import Parts
from trainer.settings import Settings
from trainer.tune.table import table_key

ENOUGH = 3
"""Earlier canaries that make a history."""
LAST = 20
WARN_BELOW, FAIL_BELOW = 0.85, 0.6
"""Speed as a share of the history's: within a card's own spread of days above the first; below the second it is
throttled, shared or broken."""


@dataclass(frozen=True)
class Throughput:
    """What was measured, and the histories that it belongs to once the whole canary has passed."""

    timing: Timing
    files: tuple[Path, ...]

    def keep(self) -> None:
        """One line more in each history."""
        timing = self.timing
        entry = {
            "v": 1,
            "time": round(time.time(), 3),
            "step_ms": round(timing.step_ms, 4),
            "samples_per_s": round(timing.samples_per_s, 4),
        }
        line = (json.dumps(entry) + "\n").encode()
        for file in self.files:
            file.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                os.write(descriptor, line)
            finally:
                os.close(descriptor)


def judge_throughput(parts: Parts, evidence: Evidence) -> Throughput | None:
    """Time steady steps and add a check for each GPU of a drafter; None where nothing was timed.

    Raises `WorkerFailed` when a worker failed.
    """
    settings = parts.settings
    gpus = sorted({device.index or 0 for device in parts.placement.drafters if device.type == "cuda"})
    if not gpus:
        why = "on a CPU a step's time says little: other programs share it"
        evidence.add(Check("throughput", None, Outcome.NOT_CHECKED, why))
        return None
    if not settings.workload.throughput_check:
        evidence.add(Check("throughput", None, Outcome.NOT_CHECKED, "workload.throughput_check is false"))
        return None
    timing = time_steps(parts)
    key = _key(parts)
    files = []
    for index in gpus:
        device = next(each for each in parts.placement.drafters if each.type == "cuda" and (each.index or 0) == index)
        file = history_file(settings, uuid_of(device), key)
        evidence.add(judged(f"cuda:{index}", timing, read_history(file)))
        files.append(file)
    return Throughput(timing, tuple(files))


def judged(device: str, timing: Timing, history: list[float]) -> Check:
    """`history`: milliseconds a step of earlier canaries, the last one last."""
    now = f"{device}: {timing.step_ms:.2f} ms a step, {timing.samples_per_s:.2f} samples/s"
    figures = {"step_ms": timing.step_ms, "samples_per_s": timing.samples_per_s, "earlier": len(history)}
    if len(history) < ENOUGH:
        return Check("throughput", None, Outcome.NOT_CHECKED, f"{now}; first sight: {len(history)} kept", figures)
    usual = statistics.median(history[-LAST:])
    share = usual / timing.step_ms
    outcome = Outcome.FAIL if share < FAIL_BELOW else Outcome.WARN if share < WARN_BELOW else Outcome.PASS
    summary = f"{now}: {share:.0%} of its usual speed ({usual:.2f} ms, {len(history[-LAST:])} canaries)"
    return Check("throughput", None, outcome, summary, {**figures, "usual_step_ms": usual, "share": share})


def _key(parts: Parts) -> str:
    told = [table_key(parts.settings, parts.drafter), parts.strategy.name]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()


def history_file(settings: Settings, uuid: str, key: str) -> Path:
    """Where the step times of one GPU with one workload and strategy are kept."""
    return settings.cache / "throughput" / uuid.replace("/", "_") / f"{key}.ndjson"


def read_history(file: Path) -> list[float]:
    """Milliseconds a step, oldest first; damaged lines are passed over."""
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return []
    found = []
    for line in lines:
        try:
            step_ms = float(json.loads(line)["step_ms"])
        except (ValueError, KeyError, TypeError):
            continue
        if math.isfinite(step_ms) and step_ms > 0:
            found.append(step_ms)
    return found
