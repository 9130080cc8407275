"""Figures of the compile strategies on one GPU, in one run: `python benchmarks/gpu_steps.py NAME [canary options]`.

Speed and memory of each strategy for a launch-bound model, alone and with two replicas that exchange; up to twelve
threads on the GPU, each one's gradient checked; the canary's wall time with cold and warm caches. `seed` is the first
team's loop, without this library: reduce-overhead with trees off, torch's own fused AdamW in bfloat16, no masters;
`whole-step, no masters` is beside it like for like, all else has float32 masters.
Writes `results/NAME/steps.md`, `steps.json` and `claim.json`. Without a GPU it runs small, to try the script, and makes
no claim.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from claims import RESULTS, ROOT, sources_digest

SOURCES = ["trainer/compile", "trainer/optimizer.py", "trainer/fused_adamw.py", "trainer/exchange.py"]
STRATEGIES = ("eager", "default", "seed", "reduce-overhead", "whole-step")
NO_MASTERS = {"strategy": "whole-step", "master_weights": "none"}
AT_ONCE = 6
LIMIT_S = 240
QUICKSTART_ON_CUDA = ("require_cuda=true", "dtype=bfloat16", "target_dtype=bfloat16")


def cases(small: bool) -> list[dict[str, Any]]:
    """What is measured, in the table's order."""
    if small:
        shape: dict[str, Any] = {"width": 32, "layers": 1, "steps": 3}
        both = [
            {**shape, "strategy": each, "replicas": replicas, "exchange": replicas > 1}
            for each in STRATEGIES
            for replicas in (1, 2)
        ]
        return [*both, {**shape, **NO_MASTERS}]
    alone = [
        {**case, "width": width, "profile": case["strategy"] == "whole-step"}
        for width in (512, 1024)
        for case in (*({"strategy": each} for each in STRATEGIES), NO_MASTERS)
    ]
    pairs = [
        {"strategy": each, "width": width, "replicas": 2, "exchange": True}
        for width in (512, 1024)
        for each in STRATEGIES[-2:]
    ]
    stress = [
        {"strategy": each, "replicas": threads, "steps": 100} for each in STRATEGIES[-2:] for threads in (2, 4, 8, 12)
    ]
    return [*alone, *pairs, *stress]


def main() -> None:
    """Exits with 1 if a case failed or was not right."""
    import torch

    cuda = torch.cuda.is_available()
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        found = run_cases(cases(small=not cuda), scratch)
        canaries = [_canary(scratch / "canary", word, sys.argv[2:]) for word in ("cold", "warm")] if cuda else []
    table = "\n".join([*_table(found), "", *(f"* canary, {each['caches']}: {each['text']}" for each in canaries)])
    print(table)
    if cuda:
        keep_claim(sys.argv[1], "steps", table, {"cases": found, "canaries": canaries}, SOURCES)
    bad = [each for each in found if not each.get("right")] + [each for each in canaries if each["exit"]]
    sys.exit(1 if bad else 0)


def run_cases(wanted: list[dict[str, Any]], scratch: Path, *, at_once: int = AT_ONCE) -> list[dict[str, Any]]:
    """The figures of each case (`step_case.Case`), or why there are none; caches lie in `scratch`."""
    with ThreadPoolExecutor(min(at_once, (os.cpu_count() or 2) // 2)) as pool:
        return list(pool.map(lambda case: _run_case(case, scratch), wanted))


def keep_claim(name: str, what: str, table: str, figures: dict[str, Any], sources: list[str]) -> None:
    """Write `results/NAME/WHAT.md`, `WHAT.json` and the claim that stands on them."""
    import torch

    out = RESULTS / name
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{what}.md").write_text(table + "\n")
    (out / f"{what}.json").write_text(json.dumps(figures, indent=2) + "\n")
    claim = {
        "date": time.strftime("%Y-%m-%d"),
        "gpu": f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}",
        "torch": torch.__version__,
        "command": shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "figures": f"{what}.json",
        "sources": sources,
        "digest": sources_digest(sources),
    }
    (out / "claim.json").write_text(json.dumps(claim, indent=2) + "\n")


def _run_case(case: dict[str, Any], scratch: Path) -> dict[str, Any]:
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "LOCK": str(scratch / "lock"),
        "TORCHINDUCTOR_CACHE_DIR": str(scratch / "inductor"),
        "TRITON_CACHE_DIR": str(scratch / "triton"),
    }
    command = [sys.executable, str(ROOT / "benchmarks" / "step_case.py"), json.dumps(case)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return {"case": case, "failed": f"not done after {LIMIT_S} s"}
    if done.returncode:
        return {"case": case, "failed": done.stderr.strip()[-2000:] or f"exit {done.returncode}"}
    line = done.stdout.splitlines()[-1]
    print(line, flush=True)
    found: dict[str, Any] = json.loads(line)
    return found


def _table(found: list[dict[str, Any]]) -> list[str]:
    """One line a case; `x seed` is how many times faster than the seed (else reduce-overhead) with the same shape."""
    seed = {
        _shape(each["case"]): each["ms_a_step"]
        for name in ("reduce-overhead", "seed")
        for each in found
        if each["case"]["strategy"] == name and "failed" not in each
    }
    lines = [
        "| strategy | d | replicas | ms a step | x seed | steps/s, all | kernels, ms | worst / tolerance | peak MiB "
        "| warm-up s |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for each in found:
        case = each["case"]
        who = f"{case.get('replicas', 1)}{' exchanging' if case.get('exchange') else ''}"
        start = f"| {case['strategy']}{without_masters(case)} | {case.get('width', 512)} | {who} "
        if "failed" in each:
            lines.append(f"{start}| failed: {each['failed'].splitlines()[-1]} |||||||")
            continue
        ms, reference = each["ms_a_step"], seed.get(_shape(case))
        cells = [
            f"{ms:.3f}",
            f"{reference / ms:.2f}" if reference else "",
            f"{each['steps_a_second_all']:.0f}",
            f"{each['kernels_ms']:.3f}" if "kernels_ms" in each else "",
            f"{each['share_of_tolerance']:.2f}",
            f"{max(each.get('peak_allocated_mib', [0])):.0f}",
            f"{max(each['warm_up_s']):.1f}",
        ]
        lines.append(f"{start}| {' | '.join(cells)} |")
    return lines


def without_masters(case: dict[str, Any]) -> str:
    """What a row of a table says of a case without master weights."""
    return ", no masters" if case.get("master_weights") == "none" else ""


def in_fp8(case: dict[str, Any]) -> str:
    """What a row of a table says of a case that multiplies 8-bit floats."""
    return ", fp8" if case.get("linear_precision") == "fp8" else ""


def _shape(case: dict[str, Any]) -> tuple[Any, ...]:
    return case.get("width", 512), case.get("replicas", 1), case.get("exchange", False)


def _canary(home: Path, caches: str, options: list[str]) -> dict[str, Any]:
    """`dflash-ops canary` at quickstart shapes with whole-step; the first call has nothing in its caches."""
    home.mkdir(exist_ok=True)
    settings = [word for each in (*QUICKSTART_ON_CUDA, "strategy=whole-step") for word in ("--set", each)]
    # the cold one's verdict would be kept
    again = ["--again"] if caches == "warm" else []
    command = [sys.executable, "-m", "dflash_ops", "canary", "--host", "local", "--json", *again, *settings, *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(home), "XDG_STATE_HOME": str(home / "state")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=home, check=False)
    events = [json.loads(line) for line in done.stdout.splitlines()]
    by_name = {each["event"]: each for each in events}
    if done.returncode:
        return {"caches": caches, "exit": done.returncode, "text": f"exit {done.returncode}: {done.stderr[-500:]}"}
    folder = home / by_name["record"]["folder"]
    parts = json.loads((folder / "verdict.json").read_text())["evidence"]["figures"]
    seconds = by_name["verdict"]["time"] - by_name["canary"]["time"]
    text = f"{seconds:.1f} s with the start of the process, of these " + ", ".join(
        f"{name} {each:.1f}" for name, each in parts.items()
    )
    print(f"canary, {caches}: {text}", flush=True)
    return {"caches": caches, "exit": 0, "text": text, "wall_seconds": seconds, **parts}


if __name__ == "__main__":
    main()
