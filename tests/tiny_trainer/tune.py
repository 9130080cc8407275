"""`tune`: this trainer has one way to compute, which is proven and timed; the others are not available."""

from __future__ import annotations

import faulthandler
import json
import os
import statistics
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

from . import files
from .canary import prove
from .evidence import PASS, Evidence
from .pipeline import run
from .settings import STRATEGIES, Settings
from .tuning import shapes, table_file, table_key

STEPS = 5
NONE_RIGHT = 6


def tune(settings: Settings, out: Path) -> int:
    """Measure, write `tuning.json`, keep the table; returns the exit code."""
    seconds = settings.workload.canary_timeout_s

    def bite() -> None:
        sys.stderr.write(f"tune: nothing came to an end in {seconds} s; the stack of every thread:\n")
        sys.stderr.flush()
        faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
        os._exit(_write(settings, out, _row("eager", "failed", f"not done after {seconds} s")))

    watchdog = threading.Timer(seconds, bite)
    watchdog.daemon = True
    watchdog.start()
    row = _eager(settings, out)
    watchdog.cancel()
    return _write(settings, out, row)


def _write(settings: Settings, out: Path, eager: dict[str, Any]) -> int:
    others = [_row(name, "not_available", "this trainer compiles nothing") for name in STRATEGIES[1:]]
    rows = [eager, *others]
    fastest = next((row["strategy"] for row in rows if row["outcome"] == "right"), None)
    table: dict[str, Any] = {
        "contract": 1,
        "key": table_key(settings),
        "devices": [{"device": "cpu", "uuid": "cpu", "name": "cpu", "memory_bytes": 0}],
        "torch": None,
        "shapes": shapes(settings),
        "strategies": rows,
        "fastest": fastest,
    }
    if fastest is not None:
        path = table_file(settings)
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_json(path, table)
    files.write_json(out / "tuning.json", table)
    return 0 if fastest is not None else NONE_RIGHT


def _row(strategy: str, outcome: str, why: str | None, **figures: float) -> dict[str, Any]:
    empty = {"step_ms": None, "samples_per_s": None, "peak_bytes": None, "warm_up_s": None}
    return {"strategy": strategy, "outcome": outcome, "why": why, **empty, **figures}


def _eager(settings: Settings, out: Path) -> dict[str, Any]:
    proof = out / "proof"
    proof.mkdir()
    evidence = Evidence(proof, "eager")
    prove(settings, evidence)
    if evidence.outcome != PASS:
        worst = next(check for check in evidence.checks if check.outcome not in (PASS, "not_checked"))
        return _row("eager", "failed" if worst.id == "worker" else "wrong", f"{worst.id}: {worst.summary}")
    timed = out / "timed"
    timed.mkdir()
    plan = replace(settings.training, steps=STEPS, log_every=1, evaluation_prompts=0, resume_from=None)
    run(replace(settings, training=plan), timed, threading.Event())
    lines = (timed / "metrics.ndjson").read_text(encoding="utf-8").splitlines()
    steps = [record for record in map(json.loads, lines) if record["kind"] == "step"]
    times = [record["time"] for record in steps]
    step_s = statistics.median(after - before for before, after in zip(times, times[1:]))
    figures = {"step_ms": step_s * 1000, "warm_up_s": 0.0}
    if step_s > 0:
        figures["samples_per_s"] = steps[-1]["samples"] / step_s
    return _row("eager", "right", None, **figures)
