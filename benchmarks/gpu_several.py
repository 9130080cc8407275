"""One process on several GPUs of this machine, in one run: `python benchmarks/gpu_several.py NAME`.

Samples a second from one GPU to all, for the small drafter and for Qwen3-8B's shape, and the share of a step that the
exchange takes, which is the most that overlapping it could bring; then the canary with one and with two drafter threads
on each GPU, its target sharing a GPU or alone on one, and the tuning of both. Writes `results/NAME/several.md`,
`several.json` and `claim.json`. Without GPUs it runs small, to try the script, and makes no claim.
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
from gpu_steps import keep_claim, run_cases

sys.path.insert(0, str(ROOT))

import torch

from tests.regressions.harness import OwnProcess, build_with, run_canary
from tests.regressions.workload import prepared_settings

SOURCES = ["trainer"]
STRATEGIES = ("reduce-overhead", "whole-step")
LARGE_AT_ONCE = 2
"""Each takes some 35 GiB of every GPU that it is on."""
TUNE_S = 400


def small_cases(model: str, gpus: int, steps: int, strategies: Sequence[str]) -> list[dict[str, Any]]:
    """Each strategy on one GPU, on all with one replica each, and with two each."""
    found: list[dict[str, Any]] = []
    for strategy in strategies:
        case = {"model": model, "strategy": strategy, "steps": steps}
        several = {**case, "gpus": gpus, "exchange": True}
        found += [case, {**several, "replicas": gpus}, {**several, "replicas": 2 * gpus}]
    return found


def large_cases(gpus: int) -> list[dict[str, Any]]:
    """On one GPU, and on all."""
    case = {"model": "drafter-8b", "strategy": "whole-step", "steps": 12}
    return [case, {**case, "gpus": gpus, "exchange": True, "replicas": gpus}]


def placements(gpus: int) -> dict[str, dict[str, Any]]:
    """Workload settings of the canaries, by what they are."""
    every = [f"cuda:{index}" for index in range(gpus)] or ["cpu", "cpu"]
    last = [every[-1]]
    return {
        "a thread a GPU, the target shares the last": {"drafter_devices": every, "target_devices": last},
        "two threads a GPU, the target shares the last": {"drafter_devices": every * 2, "target_devices": last},
        "the target alone on the last": {"drafter_devices": every[:-1], "target_devices": last},
    }


def main() -> None:
    """Exits with 1 if a case failed, a canary did not pass, or a tuning found nothing right."""
    gpus = torch.cuda.device_count()
    if gpus == 1:
        sys.exit("needs at least two GPUs, 1 is here")
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        if gpus:
            found = run_cases(small_cases("drafter-135m", gpus, 100, STRATEGIES), scratch)
            found += run_cases(large_cases(gpus), scratch, at_once=LARGE_AT_ONCE)
        else:
            found = run_cases(small_cases("drafter-tiny", 2, 3, ("eager",)), scratch)
        canaries, tunings = _proofs(gpus, scratch / "proofs")
    lines = [*_table(found), "", "| canary | strategy | exit | summary |", "|---|---|---|---|"]
    lines += [f"| {each['placement']} | {each['strategy']} | {each['exit']} | {each['summary']} |" for each in canaries]
    lines += ["", "| tuning | strategy | outcome | ms a step | samples/s |", "|---|---|---|---|---|"]
    lines += [
        f"| {each['placement']} | {row['strategy']} | {row['outcome']} | {row['step_ms']} | {row['samples_per_s']} |"
        for each in tunings
        for row in each["strategies"]
    ]
    print("\n".join(lines))
    if gpus:
        figures = {"cases": found, "canaries": canaries, "tunings": tunings}
        keep_claim(sys.argv[1], "several", "\n".join(lines), figures, SOURCES)
    bad = [each for each in found if "failed" in each] + [each for each in canaries + tunings if each["exit"]]
    sys.exit(1 if bad else 0)


def _table(found: list[dict[str, Any]]) -> list[str]:
    alone = {
        (each["case"]["model"], each["case"]["strategy"]): each["steps_a_second_all"]
        for each in found
        if "failed" not in each and not each["case"].get("exchange")
    }
    lines = [
        "| model | strategy | replicas | ms a step | samples/s | of one GPU's x GPUs | exchange, ms | its share |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for each in found:
        case = each["case"]
        start = f"| {case['model']} | {case['strategy']} | {case.get('replicas', 1)} on {case.get('gpus', 1)} "
        if "failed" in each:
            lines.append(f"{start}| failed: {each['failed'].splitlines()[-1]} |||||")
            continue
        rate = each["steps_a_second_all"]
        one = alone.get((case["model"], case["strategy"]))
        scaling = f"{rate / (one * case.get('gpus', 1)):.3f}" if one else ""
        exchange, share = "", ""
        if "exchange_ms" in each:
            exchange, share = f"{each['exchange_ms']:.3f}", f"{each['exchange_ms'] / each['ms_a_step']:.1%}"
        lines.append(f"{start}| {each['ms_a_step']:.3f} | {rate:.2f} | {scaling} | {exchange} | {share} |")
    return lines


def _proofs(gpus: int, work: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The canary of each placement and strategy, and the tuning of the first two placements, all side by side.

    Their times say nothing: they have the GPUs together.
    """
    cpus = sorted(os.sched_getaffinity(0))
    release = build_with([], work / "tree")
    base = prepared_settings(OwnProcess(cpus), release.tree, work / "workload", cuda=gpus > 0)
    wanted = placements(gpus)
    proofs = [(name, strategy) for name in wanted for strategy in (STRATEGIES if gpus else ("eager",))]
    tuned = list(wanted)[:2] if gpus else []
    jobs = max(1, min(len(proofs) + len(tuned), len(cpus) // 2))
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

    def tune(index: int) -> dict[str, Any]:
        folder = work / f"tuning-{index}"
        found = _tuning(OwnProcess(cpus), release.tree, settings_of(tuned[index], "auto"), folder)
        return {"placement": tuned[index], **found}

    with ThreadPoolExecutor(jobs) as pool:
        tunings = [pool.submit(tune, index) for index in range(len(tuned))]
        canaries = list(pool.map(prove, range(len(proofs))))
        return canaries, [each.result() for each in tunings]


def _tuning(run: OwnProcess, root: Path, settings: dict[str, Any], work: Path) -> dict[str, Any]:
    work.mkdir()
    (work / "settings.json").write_text(json.dumps(settings))
    code = run(root, ["tune", "--settings", str(work / "settings.json"), "--out", str(work)], work / "log.txt", TUNE_S)
    file = work / "tuning.json"
    rows: Sequence[dict[str, Any]] = json.loads(file.read_text())["strategies"] if file.exists() else []
    return {"exit": code, "strategies": rows}


if __name__ == "__main__":
    main()
