"""Each benchmark for GPUs runs to its end on a CPU, small: nobody finds out on lent time that it cannot."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.torch, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
QUALITY = {
    "train-count": 4, "test-count": 2, "answer-tokens": 20, "answer-batch": 6, "bucket": 128, "anchors": 4,
    "batch-size": 1, "steps": 2, "checkpoints": 1, "decoded": 1, "shapes": "1-dflash",
}  # fmt: skip


def run(script: str, *options: str) -> str:
    before = sorted(RESULTS.iterdir())
    done = subprocess.run(
        [sys.executable, f"benchmarks/{script}", "not-kept", *options],
        cwd=ROOT, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert sorted(RESULTS.iterdir()) == before
    return done.stdout


@pytest.mark.parametrize(
    "script", ["gpu_steps.py", "gpu_speed.py", "gpu_several.py", "gpu_placements.py", "gpu_gate.py"]
)
def test_it_runs_and_prints_its_table(script: str) -> None:
    table = [line for line in run(script).splitlines() if line.startswith("|")]
    assert len(table) > 2
    assert not any("failed" in line for line in table)


def test_faults_are_run_and_recorded(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    words = [sys.executable, "benchmarks/regressions.py", str(kept), "--jobs=1", "--clean=1"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [*words, "draws-weights-to-load-over"], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((kept / "regressions.json").read_text())
    # the clean canary that fills the cache is one more
    assert [(row["fault"], row["checks"], row["unlike"]) for row in rows] == [
        (None, [], None),
        ("draws-weights-to-load-over", ["generators"], None),
        (None, [], None),
    ]
    assert "1 of 1 faults stopped, 0 false alarms in 2 clean canaries" in (kept / "regressions.md").read_text()
    done = subprocess.run(
        [*words, "memory-grows"], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr.startswith("this machine cannot show memory-grows")) == (1, True)


def test_quality_is_measured_from_prompts_to_decoding(tmp_path: Path) -> None:
    questions = [f"What is {number} plus {number}?" for number in range(6)]
    files = {"train": questions[:4], "test": questions[4:]}
    for name, kept in files.items():
        (tmp_path / name).write_text("".join(json.dumps({"prompt": each}) + "\n" for each in kept))
    given = [f"--{name}={value}" for name, value in QUALITY.items()]
    out = run("gpu_quality.py", *(f"--{name}={tmp_path / name}" for name in files), *given)
    assert "tau" in out
