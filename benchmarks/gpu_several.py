"""One process on several GPUs of this machine, in one run: `python benchmarks/gpu_several.py NAME`.

Samples a second from one GPU to all, for the small drafter and for Qwen3-8B's shape, and the share of a step that the
exchange takes; then the canary with one and with two drafter threads on each GPU, its target sharing a GPU or alone on
one. Writes `results/NAME/several.md`, `several.json` and `claim.json`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from claims import ROOT
from gpu_steps import keep_claim, run_cases

SOURCES = ["trainer"]
STRATEGIES = ("reduce-overhead", "whole-step")


def cases(gpus: int) -> list[dict[str, Any]]:
    """Each shape and strategy on one GPU, on all with one replica each, and (the small ones) with two each."""
    found: list[dict[str, Any]] = []
    for model, steps, crowded in (("drafter-135m", 100, True), ("drafter-8b", 12, False)):
        for strategy in STRATEGIES:
            case = {"model": model, "strategy": strategy, "steps": steps}
            several = {**case, "gpus": gpus, "exchange": True}
            found += [case, {**several, "replicas": gpus}]
            if crowded:
                found.append({**several, "replicas": 2 * gpus})
    return found


def placements(gpus: int) -> dict[str, dict[str, Any]]:
    """Workload settings of the canaries, by what they are."""
    every = [f"cuda:{index}" for index in range(gpus)]
    last = [every[-1]]
    return {
        "a thread a GPU, the target shares the last": {"drafter_devices": every, "target_devices": last},
        "two threads a GPU, the target shares the last": {"drafter_devices": every * 2, "target_devices": last},
        "the target alone on the last": {"drafter_devices": every[:-1], "target_devices": last},
    }


def main() -> None:
    """Exits with 1 if a case failed, or a canary did not pass."""
    import torch

    gpus = torch.cuda.device_count()
    if gpus < 2:
        sys.exit(f"needs at least two GPUs, {gpus} are here")
    with tempfile.TemporaryDirectory() as folder:
        found = run_cases(cases(gpus), Path(folder))
        canaries = [
            {
                "placement": name,
                "strategy": strategy,
                **_canary(Path(folder) / "home", {**workload, "strategy": strategy}),
            }
            for strategy in STRATEGIES
            for name, workload in placements(gpus).items()
        ]
    lines = [*_table(found), "", "| canary | strategy | exit | summary |", "|---|---|---|---|"]
    lines += [f"| {each['placement']} | {each['strategy']} | {each['exit']} | {each['summary']} |" for each in canaries]
    print("\n".join(lines))
    keep_claim(sys.argv[1], "several", "\n".join(lines), {"cases": found, "canaries": canaries}, SOURCES)
    sys.exit(1 if any("failed" in each for each in found) or any(each["exit"] for each in canaries) else 0)


def _table(found: list[dict[str, Any]]) -> list[str]:
    alone = {
        (each["case"]["model"], each["case"]["strategy"]): each["steps_a_second_all"]
        for each in found
        if "failed" not in each and not each["case"].get("exchange")
    }
    lines = [
        "| model | strategy | replicas | ms a step | samples/s | of one GPU's x GPUs | exchange, ms |",
        "|---|---|---|---|---|---|---|",
    ]
    for each in found:
        case = each["case"]
        start = f"| {case['model']} | {case['strategy']} | {case.get('replicas', 1)} on {case.get('gpus', 1)} "
        if "failed" in each:
            lines.append(f"{start}| failed: {each['failed'].splitlines()[-1]} ||||")
            continue
        rate = each["steps_a_second_all"]
        one = alone.get((case["model"], case["strategy"]))
        scaling = f"{rate / (one * case.get('gpus', 1)):.3f}" if one else ""
        exchange = f"{each['exchange_ms']:.3f}" if "exchange_ms" in each else ""
        lines.append(f"{start}| {each['ms_a_step']:.3f} | {rate:.2f} | {scaling} | {exchange} |")
    return lines


def _canary(home: Path, workload: dict[str, Any]) -> dict[str, Any]:
    home.mkdir(exist_ok=True)
    settings: dict[str, Any] = {
        "require_cuda": True,
        "dtype": "bfloat16",
        "target_dtype": "bfloat16",
        "drafter_threads": len(workload["drafter_devices"]),
        **workload,
    }
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={json.dumps(value)}")]
    command = [sys.executable, "-m", "dflash_ops", "canary", "--host", "local", "--json", *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(home)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=home, check=False)
    events = [json.loads(line) for line in done.stdout.splitlines()]
    verdict = next((each for each in reversed(events) if each["event"] == "verdict"), {})
    summary = verdict.get("summary") or (done.stderr.strip().splitlines() or [""])[-1]
    return {"exit": done.returncode, "summary": summary, "settings": settings}


if __name__ == "__main__":
    main()
