"""The gate and the tuning by placement, on one GPU or several: `python benchmarks/gpu_placements.py NAME`.

The canary with one and with two drafter threads on each GPU, its target sharing a GPU or (with several) alone on one,
by the strategies with graphs, side by side; then the tuning of the first placement, alone on the machine, so that its
times say something. Writes `results/NAME/placements.md`, `placements.json` and `claim.json`. Without GPUs it runs
small and without the tuning, to try the script, and makes no claim.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from claims import ROOT
from gpu_steps import keep_claim

sys.path.insert(0, str(ROOT))

import torch

from tests.regressions.harness import OwnProcess, build_with, run_canary
from tests.regressions.workload import prepared_settings

SOURCES = ["trainer"]
STRATEGIES = ("reduce-overhead", "whole-step")
TUNE_S = 400


def placements(gpus: int) -> dict[str, dict[str, Any]]:
    """Workload settings of the canaries, by what they are."""
    every = [f"cuda:{index}" for index in range(gpus)] or ["cpu", "cpu"]
    last = [every[-1]]
    if gpus == 1:
        return {
            "one thread, the target shares its GPU": {"drafter_devices": every, "target_devices": last},
            "two threads, the target shares their GPU": {"drafter_devices": every * 2, "target_devices": last},
        }
    return {
        "a thread a GPU, the target shares the last": {"drafter_devices": every, "target_devices": last},
        "two threads a GPU, the target shares the last": {"drafter_devices": every * 2, "target_devices": last},
        "the target alone on the last": {"drafter_devices": every[:-1], "target_devices": last},
    }


def main() -> None:
    """Exits with 1 if a canary did not pass or a tuning found nothing right."""
    gpus = torch.cuda.device_count()
    with tempfile.TemporaryDirectory() as folder:
        canaries, tunings = _proofs(gpus, Path(folder))
    lines = ["| canary | strategy | exit | summary |", "|---|---|---|---|"]
    lines += [f"| {each['placement']} | {each['strategy']} | {each['exit']} | {each['summary']} |" for each in canaries]
    lines += ["", "| tuning | strategy | outcome | ms a step | samples/s |", "|---|---|---|---|---|"]
    lines += [
        f"| {each['placement']} | {row['strategy']} | {row['outcome']} | {row['step_ms']} | {row['samples_per_s']} |"
        for each in tunings
        for row in each["strategies"]
    ]
    table = "\n".join(lines)
    print(table)
    if gpus:
        keep_claim(sys.argv[1], "placements", table, {"canaries": canaries, "tunings": tunings}, SOURCES)
    sys.exit(1 if any(each["exit"] for each in canaries + tunings) else 0)


def _proofs(gpus: int, work: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The canary of each placement and strategy, several at a time, then the tuning of the first placement, alone."""
    cpus = sorted(os.sched_getaffinity(0))
    release = build_with([], work / "tree")
    base = prepared_settings(OwnProcess(cpus), release.tree, work / "workload", cuda=gpus > 0)
    wanted = placements(gpus)
    proofs = [(name, strategy) for name in wanted for strategy in (STRATEGIES if gpus else ("eager",))]
    jobs = max(1, min(len(proofs), len(cpus) // 2))
    shares = [cpus[index::jobs] for index in range(jobs)]

    def settings_of(name: str, strategy: str) -> dict[str, Any]:
        own = {**wanted[name], "drafter_threads": len(wanted[name]["drafter_devices"]), "strategy": strategy}
        return {**base, "workload": {**base["workload"], **own}}

    def prove(index: int) -> dict[str, Any]:
        name, strategy = proofs[index]
        folder = work / f"canary-{index}"
        folder.mkdir()
        canary = run_canary(OwnProcess(shares[index % jobs]), release.tree, settings_of(name, strategy), folder)
        return {"placement": name, "strategy": strategy, "exit": canary.code, "summary": canary.message}

    def tune(name: str) -> dict[str, Any]:
        return {
            "placement": name,
            **_tuning(OwnProcess(cpus), release.tree, settings_of(name, "auto"), work / "tuning"),
        }

    with ThreadPoolExecutor(jobs) as pool:
        canaries = list(pool.map(prove, range(len(proofs))))
    return canaries, [tune(name) for name in list(wanted)[:1] if gpus]


def _tuning(run: OwnProcess, root: Path, settings: dict[str, Any], work: Path) -> dict[str, Any]:
    work.mkdir()
    (work / "settings.json").write_text(json.dumps(settings))
    code = run(root, ["tune", "--settings", str(work / "settings.json"), "--out", str(work)], work / "log.txt", TUNE_S)
    file = work / "tuning.json"
    rows: Sequence[dict[str, Any]] = json.loads(file.read_text())["strategies"] if file.exists() else []
    return {"exit": code, "strategies": rows}


if __name__ == "__main__":
    main()
