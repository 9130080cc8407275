"""The `tune` verb: each strategy proven, then timed, each in processes of its own, one after the other.

A strategy that crashes or hangs is a row of the table, and ends nothing else.
"""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from trainer.assets import resolve_asset
from trainer.check import devices
from trainer.compile import available_strategies
from trainer.facts import open_data, target_facts
from trainer.files import write_json
from trainer.placement import place
from trainer.settings import CONTRACT, Settings
from trainer.target_files import target_folder
from trainer.tune.table import Row, fastest, shapes, table_key, table_path
from trainer.tune.trial import EVIDENCE, PROOF, REFUSED, TIMES, TIMING, WHY

TUNED, NONE_RIGHT = 0, 6
_SLACK_S = 60
"""The trial's own watchdog bites first and says more."""
_NO_NUMBERS = ("worker", "watchdog")
"""Checks that fail because nothing came to an end, not because it was wrong."""

log = logging.getLogger(__name__)


class _Refused(Exception):  # noqa: N818 -- the trial has said why, and no strategy can mend it
    pass


def tune(settings: Settings, file: Path, out: Path, *, strategies: Sequence[str] | None = None) -> int:
    """Measure, keep the table, write `tuning.json` last; the exit code. `file` is where `settings` come from.

    `strategies`: those to measure, all by default. Raises `InputError`.
    """
    started = time.monotonic()
    # a GGUF file is converted first: its small files load much faster from there
    target_folder(resolve_asset(settings.workload.target, "workload.target"), settings.cache)
    facts = target_facts(settings)
    key = table_key(settings, facts.drafter)
    # what every trial would refuse
    open_data(settings, facts.tokenizer, facts.config.vocab_size)
    placement = place(settings.workload, torch.cuda.device_count())
    available = available_strategies(placement.drafters)
    if strategies is not None:
        available = {name: available[name] for name in strategies}
    try:
        rows = [_measured(settings, file, out / name, name, why) for name, why in available.items()]
    except _Refused:
        return REFUSED
    best = fastest(rows)
    table = {
        "contract": CONTRACT,
        "key": key,
        "devices": devices(),
        "torch": torch.__version__,
        "shapes": shapes(settings),
        "strategies": [row.to_json() for row in rows],
        "fastest": best,
        "time": round(time.time(), 3),
        "seconds": round(time.monotonic() - started, 1),
    }
    if best is not None:
        path = table_path(settings, key)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, table)
        log.info("auto is %s; kept in %s", best, path)
    write_json(out / "tuning.json", table)
    return TUNED if best is not None else NONE_RIGHT


def _measured(settings: Settings, file: Path, out: Path, strategy: str, unavailable: str | None) -> Row:
    row = Row(strategy, "not_available", unavailable) if unavailable else _row(settings, file, out, strategy)
    figures = "" if row.step_ms is None else f", {row.step_ms:.2f} ms a step, {row.samples_per_s:.2f} samples/s"
    log.info("tune %s: %s%s%s", strategy, row.outcome, figures, f": {row.why}" if row.why else "")
    return row


def _row(settings: Settings, file: Path, out: Path, strategy: str) -> Row:
    died = _run(PROOF, settings, file, out / PROOF, strategy)
    evidence = _read(out / PROOF / EVIDENCE)
    if evidence is None:
        return Row(strategy, "failed", _why(out / PROOF) or died)
    if evidence["outcome"] != "pass":
        worst = next(each for each in evidence["checks"] if each["outcome"] == evidence["outcome"])
        wrong = evidence["outcome"] == "fail" and worst["id"] not in _NO_NUMBERS
        return Row(strategy, "wrong" if wrong else "failed", evidence["summary"])
    died = _run(TIMING, settings, file, out / TIMING, strategy)
    times = _read(out / TIMING / TIMES)
    if died is not None or times is None:
        return Row(strategy, "failed", _why(out / TIMING) or died or "it left no times")
    return Row(
        strategy,
        "right",
        step_ms=round(times["step_ms"], 4),
        samples_per_s=round(times["samples_per_s"], 4),
        peak_bytes=times["peak_bytes"],
        warm_up_s=round(times["warm_up_s"], 2),
    )


def _run(phase: str, settings: Settings, file: Path, out: Path, strategy: str) -> str | None:
    """One phase to its end; None, or in words how it ended otherwise."""
    out.mkdir(parents=True)
    log.info("tune %s: %s", strategy, phase)
    call = [sys.executable, "-m", "trainer.tune.trial", phase]
    call += ["--settings", str(file), "--strategy", strategy, "--out", str(out)]
    trial = subprocess.Popen(call, stdin=subprocess.DEVNULL)
    before = _pass_on(trial)
    try:
        code = trial.wait(settings.workload.canary_timeout_s + _SLACK_S)
    except subprocess.TimeoutExpired:
        return f"{phase} did not come to its end, and was killed"
    finally:
        trial.kill()
        trial.wait()
        for number, handler in before.items():
            signal.signal(number, handler)
    if code == REFUSED:
        raise _Refused
    if code < 0:
        return f"{phase} was killed by {signal.Signals(-code).name}"
    return f"{phase} ended with exit code {code}" if code else None


def _pass_on(trial: subprocess.Popen[bytes]) -> dict[signal.Signals, Any]:
    """SIGUSR1 shows the trial's stacks too; SIGTERM ends this process through `finally`, and so the trial."""

    def stacks(_number: int, _frame: FrameType | None) -> None:
        trial.send_signal(signal.SIGUSR1)

    def end(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    return {
        signal.SIGUSR1: signal.signal(signal.SIGUSR1, stacks),
        signal.SIGTERM: signal.signal(signal.SIGTERM, end),
    }


def _read(path: Path) -> dict[str, Any] | None:
    try:
        value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return value


def _why(out: Path) -> str | None:
    found = _read(out / WHY)
    return None if found is None else str(found["why"]).strip().splitlines()[-1]
