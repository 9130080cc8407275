"""Several GPUs in one process, in one run: `python benchmarks/gpu_several.py NAME`.

Samples a second from one GPU to all, for the small drafter and for Qwen3-8B's shape, the share of a step that the
exchange takes, and the most that overlapping it could bring: steps beside the same traffic that wait for none of it,
whose replicas therefore train apart. Each replica's own gradient is judged in every case. Writes
`results/NAME/several.md`, `several.json` and `claim.json`. Without GPUs it runs small, to try the script, and makes no
claim; what needs CUDA's streams, the overlapped case, is then absent.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from gpu_steps import keep_claim, run_cases

SOURCES = ["trainer"]
KINDS = (("reduce-overhead", 1), ("whole-step", 1), ("whole-step", 4))
LARGE_AT_ONCE = 2
"""Each takes some 35 GiB of every GPU that it is on, and half as much again while its gradients are judged."""


def small_cases(model: str, gpus: int, steps: int, kinds: Sequence[tuple[str, int]]) -> list[dict[str, Any]]:
    """Each strategy and number of rows on one GPU, on all with one replica each, and with two each."""
    found: list[dict[str, Any]] = []
    for strategy, rows in kinds:
        case = {"model": model, "strategy": strategy, "rows": rows, "steps": steps}
        several = {**case, "gpus": gpus, "exchange": True}
        found += [case, {**several, "replicas": gpus}, {**several, "replicas": 2 * gpus}]
    return found


def overlapped(cases: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The last case that exchanges with one replica a GPU, as if all of the exchange overlapped."""
    one_each = [each for each in cases if each.get("exchange") and each["replicas"] == each["gpus"]]
    return {**one_each[-1], "overlapped": True}


def large_cases(gpus: int) -> list[dict[str, Any]]:
    """On one GPU, and on all."""
    case = {"model": "drafter-8b", "strategy": "whole-step", "steps": 12}
    return [case, {**case, "gpus": gpus, "exchange": True, "replicas": gpus}]


def main() -> None:
    """Exits with 1 if a case failed or was not right."""
    gpus = torch.cuda.device_count()
    if gpus == 1:
        sys.exit("needs at least two GPUs, 1 is here")
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        if gpus:
            small, large = small_cases("drafter-135m", gpus, 100, KINDS), large_cases(gpus)
            found = run_cases([*small, overlapped(small)], scratch)
            found += run_cases([*large, overlapped(large)], scratch, at_once=LARGE_AT_ONCE)
        else:
            found = run_cases(small_cases("drafter-tiny", 2, 3, (("eager", 1), ("eager", 2))), scratch)
    table = "\n".join(_table(found))
    print(table)
    if gpus:
        keep_claim(sys.argv[1], "several", table, {"cases": found}, SOURCES)
    sys.exit(0 if all(each.get("right") for each in found) else 1)


def _table(found: list[dict[str, Any]]) -> list[str]:
    alone = {
        _kind(each["case"]): each["steps_a_second_all"]
        for each in found
        if "failed" not in each and not each["case"].get("exchange")
    }
    lines = [
        "| model | strategy | rows | replicas | ms a step | samples/s | of one GPU's x GPUs | exchange, ms "
        "| its share | worst / tolerance |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for each in found:
        case, rows = each["case"], each["case"].get("rows", 1)
        start = f"| {case['model']} | {case['strategy']} | {rows} | {case.get('replicas', 1)} on {case.get('gpus', 1)} "
        if "failed" in each:
            lines.append(f"{start}| failed: {each['failed'].splitlines()[-1]} ||||||")
            continue
        rate = each["steps_a_second_all"]
        one = alone.get(_kind(case))
        scaling = f"{rate / (one * case.get('gpus', 1)):.3f}" if one else ""
        exchange, share = "as if all of it overlapped" if case.get("overlapped") else "", ""
        if "exchange_ms" in each:
            exchange, share = f"{each['exchange_ms']:.3f}", f"{each['exchange_ms'] / each['ms_a_step']:.1%}"
        judged = f"{each['share_of_tolerance']:.2f}"
        lines.append(
            f"{start}| {each['ms_a_step']:.3f} | {rows * rate:.2f} | {scaling} | {exchange} | {share} | {judged} |"
        )
    return lines


def _kind(case: dict[str, Any]) -> tuple[Any, ...]:
    return case["model"], case["strategy"], case.get("rows", 1)


if __name__ == "__main__":
    main()
