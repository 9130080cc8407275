"""A whole deploy on the GPU of this machine, kept as a claim: `python benchmarks/gpu_deploy.py NAME [deploy options]`.

Runs `dflash-ops deploy --host local` from build to collect with the quickstart's real target, requiring CUDA, then its
canary again with what the first one compiled, until the last one has history enough to judge the GPU's speed, and keeps
the run's record (without weights) in benchmarks/results/NAME beside `claim.json`. In a home of its own: nothing is in
its caches at first.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from claims import RESULTS, ROOT, sources_digest
from pipeline import pipeline_medians

sys.path.insert(0, str(ROOT))

from trainer.canary.throughput import ENOUGH

SOURCES = ["trainer", "dflash_ops/agent/devices.py"]
SETTINGS = [
    "require_cuda=true",
    "strategy=whole-step",
    "dtype=bfloat16",
    "target_dtype=bfloat16",
    "buckets=[256]",
    "anchors=64",
    "batch_size=4",
    "prompt_count=60",
    "answer_tokens=64",
    "answer_batch=56",
    "steps=300",
    "checkpoint_every=150",
    "evaluation_prompts=4",
    "evaluation_tokens=32",
]


def main() -> None:
    """Exits with the deploy's code."""
    name, *more = sys.argv[1:]
    settings = [word for setting in SETTINGS for word in ("--set", setting)]
    program = [sys.executable, "-m", "dflash_ops"]
    command = [*program, "deploy", "--host", "local", "--json", *settings, *more]
    with tempfile.TemporaryDirectory() as folder:
        code, events = _run(command, Path(folder))
        if events[-1]["folder"] is None:
            sys.exit(f"nothing was launched: {next(each['what'] for each in events if each['event'] == 'error')}")
        out = RESULTS / name
        shutil.rmtree(out, ignore_errors=True)
        kept = shutil.ignore_patterns("*.safetensors", "tensorboard", "out", ".collecting")
        shutil.copytree(events[-1]["folder"], out, ignore=kept)
        canaries = {"cold": _canary(events)}
        # the deploy's own canary is the first of the history
        for _ in range(ENOUGH):
            if code == 0:
                code, again = _run(
                    [*program, "canary", "--host", "local", "--json", "--again", *settings, *more], Path(folder)
                )
                canaries |= {"warm": _canary(again), "throughput": _throughput(again)}
    pipeline = pipeline_medians(out) if (out / "metrics.ndjson").exists() else None
    (out / "claim.json").write_text(json.dumps(_claim(events, canaries, pipeline, command), indent=2) + "\n")
    sys.exit(code)


def _run(command: list[str], home: Path) -> tuple[int, list[dict[str, Any]]]:
    """Exit code and events."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(home)}
    done = subprocess.run(command, cwd=home, stdout=subprocess.PIPE, text=True, check=False, env=environment)
    events = [json.loads(line) for line in done.stdout.splitlines()]
    for event in events:
        if event["event"] not in ("log", "progress"):
            print(json.dumps(event)[:400], flush=True)
    return done.returncode, events


def _canary(events: list[dict[str, Any]]) -> dict[str, float] | None:
    """Its seconds from the order to the verdict, the start of its process included, and what it says of its parts."""
    by_name = {event["event"]: event for event in events}
    evidence = _evidence(events)
    if evidence is None or not {"canary", "verdict"} <= set(by_name):
        return None
    return {"wall_seconds": round(by_name["verdict"]["time"] - by_name["canary"]["time"], 1), **evidence["figures"]}


def _throughput(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What a canary's throughput check said, for each GPU."""
    evidence = _evidence(events)
    return [] if evidence is None else [each for each in evidence["checks"] if each["id"] == "throughput"]


def _evidence(events: list[dict[str, Any]]) -> dict[str, Any] | None:
    folder = events[-1]["folder"]
    if folder is None or not (file := Path(folder) / "verdict.json").exists():
        return None
    found: dict[str, Any] = json.loads(file.read_text())["evidence"]
    return found


def _claim(
    events: list[dict[str, Any]], canaries: dict[str, Any], pipeline: dict[str, float] | None, command: list[str]
) -> dict[str, Any]:
    import torch

    by_name = {event["event"]: event for event in events}
    marks = ("connected", "prepared", "canary", "verdict", "ended", "collected")
    starts = {name: by_name[name]["time"] for name in marks if name in by_name}
    verdict = by_name.get("verdict", {})
    return {
        "date": time.strftime("%Y-%m-%d"),
        "gpu": f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}",
        "torch": torch.__version__,
        "command": shlex.join(["dflash-ops", *command[3:]]),
        "exit": events[-1]["exit"],
        "figures": {
            "seconds_since_connected": {name: round(at - starts["connected"], 1) for name, at in starts.items()},
            "canary": {"outcome": verdict.get("outcome"), "summary": verdict.get("summary"), **canaries},
            "pipeline": pipeline,
            "quality": by_name.get("collected", {}).get("quality"),
        },
        "sources": SOURCES,
        "digest": sources_digest(SOURCES),
    }


if __name__ == "__main__":
    main()
