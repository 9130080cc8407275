"""The real trainer's canary: it passes where all is right, and names what is wrong, where one thing is."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from trainer.canary import measure, run_canary
from trainer.errors import InputError
from trainer.settings import settings_from_json

pytestmark = pytest.mark.torch

ROOT = Path(__file__).parents[2]
FAULTS = Path(__file__).parent / "faults"
Json = dict[str, Any]


def canary(settings: Json, work: Path, *, fault: str | None = None) -> tuple[int, Json, str]:
    """Run the canary in a process of its own, from a copy of the trainer with a fault: code, evidence, log."""
    root, out = work / "release", work / "out"
    out.mkdir()
    shutil.copytree(ROOT / "trainer", root / "trainer", ignore=shutil.ignore_patterns("__pycache__"))
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(work), "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("PYTHONPATH", None)
    if fault is not None:
        patch = ["git", "apply", "-p1", str(FAULTS / f"{fault}.patch")]
        subprocess.run(patch, cwd=root, env=environment, check=True)
    file = work / "settings.json"
    file.write_text(json.dumps(settings))
    call = [sys.executable, "-m", "trainer", "canary", "--settings", str(file), "--out", str(out)]
    done = subprocess.run(
        call, cwd=root, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    log = done.stdout + done.stderr
    assert (out / "evidence.json").exists(), log
    return done.returncode, json.loads((out / "evidence.json").read_text()), log


# two kinds of layers, so two masks a step; weights that the step makes itself
OTHER: Json = {"draft_layers": 2, "sliding_window": 6, "loss_type": "dpace"}


def outcomes(evidence: Json, outcome: str) -> set[tuple[str, int | None]]:
    return {(check["id"], check["worker"]) for check in evidence["checks"] if check["outcome"] == outcome}


def in_this_process(settings: Json, out: Path) -> tuple[int, Json]:
    out.mkdir()
    code = run_canary(settings_from_json(settings), out)
    return code, json.loads((out / "evidence.json").read_text())


NO_MASTERS: Json = {"dtype": "bfloat16", "master_weights": "none"}


@pytest.mark.parametrize("shape", [{"dtype": "float32", **OTHER}, {"dtype": "bfloat16"}, NO_MASTERS])
def test_a_right_trainer_passes_and_the_rest_is_not_checked(
    ready: Callable[..., Json], tmp_path: Path, shape: Json
) -> None:
    settings = ready(**shape, accumulation=2, batch_size=2, buckets=[24, 32], canary_steps=1)
    code, evidence = in_this_process(settings, tmp_path / "out")
    assert (code, evidence["outcome"]) == (0, "pass"), evidence
    each = ("outputs", "loss", "gradients", "exchange", "parameters", "replicas", "moved", "warm_up", "learning_rate")
    for name in each:
        assert {(name, 0), (name, 1)} <= outcomes(evidence, "pass")
    whole = ("negative_control", "generators", "save_and_load", "memory_back", "rehearsal", "sigterm", "checkpoint")
    for name in whole:
        assert (name, None) in outcomes(evidence, "pass")
    unchecked = {name for name, _ in outcomes(evidence, "not_checked")}
    compiled = {"compile_gate", "code_objects", "recompiles", "control_code_objects"}
    cuda = {"cuda_graphs", "graph_pools", "control_graphs", "memory", "throughput", "health", "xid"}
    assert unchecked == {*compiled, *cuda}
    assert (evidence["strategy"], evidence["tuning"]) == ("eager", None)
    ended = json.loads((tmp_path / "out" / "rehearsal" / "result.json").read_text())
    # both ends of a run are rehearsed: the signal, and the closing evaluation
    assert (ended["outcome"], ended["steps"]) == ("stopped", 1)
    assert ended["after"]["tau"] >= 1


def test_a_comparison_that_sees_nothing_is_inconclusive(
    ready: Callable[..., Json], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "FACTOR", 1e9)
    code, evidence = in_this_process(ready(), tmp_path / "out")
    assert (code, evidence["outcome"]) == (7, "inconclusive")
    assert outcomes(evidence, "inconclusive") == {("negative_control", None)}
    assert not (tmp_path / "out" / "rehearsal").exists()


def test_without_data_the_settings_are_refused(ready: Callable[..., Json], tmp_path: Path) -> None:
    settings = settings_from_json({**ready(), "prepared": None})
    with pytest.raises(InputError, match="prepare"):
        run_canary(settings, tmp_path)
    assert not (tmp_path / "evidence.json").exists()


def test_the_verdict_does_not_hang_on_the_learning_rate(ready: Callable[..., Json], tmp_path: Path) -> None:
    settings = settings_from_json(ready())
    training = dataclasses.replace(settings.training, learning_rate=1e-30, weight_decay=1.0)
    assert run_canary(dataclasses.replace(settings, training=training), tmp_path) == 0


def test_a_wrong_gradient_is_named_by_worker_and_parameter(ready: Callable[..., Json], tmp_path: Path) -> None:
    code, evidence, _ = canary(ready(), tmp_path, fault="wrong-gradient-one-worker")
    assert (code, evidence["outcome"]) == (6, "fail")
    failed = outcomes(evidence, "fail")
    assert ("gradients", 1) in failed and ("gradients", 0) not in failed
    assert evidence["summary"].startswith("gradients (drafter 1): worst in fc.weight")
    assert not (tmp_path / "out" / "rehearsal").exists()


def test_a_replica_that_is_left_out_of_the_average(ready: Callable[..., Json], tmp_path: Path) -> None:
    code, evidence, _ = canary(ready(), tmp_path, fault="average-leaves-one-out")
    assert code == 6
    assert outcomes(evidence, "fail") == {("exchange", 0), ("exchange", 1)}


def test_a_hang_ends_with_every_stack(ready: Callable[..., Json], tmp_path: Path) -> None:
    code, evidence, log = canary(ready(canary_timeout_s=25), tmp_path, fault="worker-hangs")
    assert code == 6
    assert outcomes(evidence, "fail") == {("watchdog", None)}
    assert "in _train" in log and log.count("most recent call first") >= 3


def test_a_dying_worker_shows_its_traceback(ready: Callable[..., Json], tmp_path: Path) -> None:
    code, evidence, log = canary(ready(), tmp_path, fault="worker-dies")
    assert code == 6
    (check,) = (check for check in evidence["checks"] if check["id"] == "worker")
    assert check["worker"] == 1 and "RuntimeError: this worker dies" in check["summary"]
    assert evidence["summary"] == "worker (drafter 1): RuntimeError: this worker dies"
    assert "drafter-1 failed" in log


@pytest.mark.compiles
@pytest.mark.slow
@pytest.mark.parametrize("shape", [{"strategy": "default"}, {"strategy": "whole-step", **OTHER}])
def test_compiled_workers_pass(ready: Callable[..., Json], tmp_path: Path, shape: Json) -> None:
    code, evidence, log = canary(ready(**shape), tmp_path)
    assert code == 0, log
    wanted = {("compile_gate", None), ("recompiles", None), ("code_objects", 0), ("code_objects", 1)}
    wanted |= {("control_code_objects", None), ("memory_back", None)}
    assert wanted <= outcomes(evidence, "pass")


@pytest.mark.compiles
@pytest.mark.slow
def test_a_shared_code_object(ready: Callable[..., Json], tmp_path: Path) -> None:
    code, evidence, _ = canary(ready(strategy="default"), tmp_path, fault="shared-code-object")
    assert code == 6
    assert ("code_objects", 1) in outcomes(evidence, "fail")


@pytest.mark.compiles
@pytest.mark.slow
def test_a_compile_outside_the_gate(ready: Callable[..., Json], tmp_path: Path) -> None:
    code, evidence, _ = canary(ready(strategy="default"), tmp_path, fault="compile-without-gate")
    assert code == 6
    assert ("compile_gate", None) in outcomes(evidence, "fail")
