"""A whole deploy on the GPU of this machine, kept as a claim: `python benchmarks/gpu_deploy.py NAME [deploy options]`.

Runs `dflash-ops deploy --host local` from build to collect with the quickstart's real target, requiring CUDA, and keeps
the run's record (without weights) in benchmarks/results/NAME beside `claim.json`.
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
from typing import Any

from claims import RESULTS, ROOT, sources_digest

SOURCES = ["trainer", "dflash_ops/agent/devices.py"]
SETTINGS = [
    "require_cuda=true",
    "strategy=reduce-overhead",
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
    command = [sys.executable, "-m", "dflash_ops", "deploy", "--host", "local", "--json", *settings, *more]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True, check=False, env=_environment())
        events = [json.loads(line) for line in done.stdout.splitlines()]
        for event in events:
            if event["event"] not in ("log", "progress"):
                print(json.dumps(event)[:400])
        out = RESULTS / name
        shutil.rmtree(out, ignore_errors=True)
        kept = shutil.ignore_patterns("*.safetensors")
        shutil.copytree(events[-1]["folder"], out, ignore=kept)
    (out / "claim.json").write_text(json.dumps(_claim(events, command), indent=2) + "\n")
    sys.exit(done.returncode)


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def _claim(events: list[dict[str, Any]], command: list[str]) -> dict[str, Any]:
    import torch

    by_name = {event["event"]: event for event in events}
    marks = ("connected", "prepared", "canary", "verdict", "ended", "collected")
    starts = {name: by_name[name]["time"] for name in marks if name in by_name}
    verdict = by_name.get("verdict", {})
    return {
        "date": time.strftime("%Y-%m-%d"),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "command": shlex.join(["dflash-ops", *command[3:]]),
        "exit": events[-1]["exit"],
        "figures": {
            "seconds_since_connected": {name: round(at - starts["connected"], 1) for name, at in starts.items()},
            "canary": {"outcome": verdict.get("outcome"), "summary": verdict.get("summary")},
            "quality": by_name.get("collected", {}).get("quality"),
        },
        "sources": SOURCES,
        "digest": sources_digest(SOURCES),
    }


if __name__ == "__main__":
    main()
