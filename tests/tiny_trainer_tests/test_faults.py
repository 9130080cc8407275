"""Each fault of the tiny trainer does what its name says: this is what the tests of the gate rely on."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from .harness import Ended, Json, Living, Trainer
from .suite import with_changes
from .test_contract import TESTS, tiny_settings

FAULTS = TESTS / "tiny_trainer" / "faults"


class Broken:
    """A copy of the tiny trainer with one fault, and settings for it."""

    def __init__(self, fault: str, work: Path) -> None:
        root = work / "release"
        shutil.copytree(TESTS / "tiny_trainer", root / "tiny_trainer")
        # git would look for a repository above; the fault applies to a plain tree
        environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(root)}
        patch = ["git", "apply", "-p1", str(FAULTS / f"{fault}.patch")]
        subprocess.run(patch, cwd=root, env=environment, check=True)
        settings = lambda **changes: tiny_settings(work, **changes)  # noqa: E731
        self.trainer = Trainer("tiny_trainer", sys.executable, root, work, settings)

    def ready(self, **tables: Json) -> Json:
        """Return settings whose data is prepared, by the trainer that is not broken."""
        whole = Trainer("tiny_trainer", sys.executable, TESTS, self.trainer.work, self.trainer.settings)
        prepared = whole.call("prepare", whole.settings(), "prepared")
        assert prepared.code == 0, prepared.errors
        return with_changes({**whole.settings(), "prepared": str(prepared.out)}, **tables)

    def canary(self, **workload: int) -> Ended:
        return self.trainer.call("canary", self.ready(workload=workload), "canary")

    def run(self, **training: int) -> Ended:
        return self.trainer.call("run", self.ready(training=training), "run")


def broken(fault: str, work: Path) -> Broken:
    return Broken(fault, work)


def failed(ended: Ended) -> list[tuple[str, int | None]]:
    return [
        (check["id"], check["worker"]) for check in ended.read("evidence.json")["checks"] if check["outcome"] == "fail"
    ]


def test_every_fault_has_a_test() -> None:
    source = Path(__file__).read_text()
    named = set(re.findall(r'broken\("([a-z0-9-]+)"', source))
    assert named == {path.stem for path in FAULTS.glob("*.patch")}


def test_syntax_error_cannot_start(tmp_path: Path) -> None:
    ended = broken("syntax-error", tmp_path).canary()
    assert ended.code not in (0, 6, 7)
    assert "SyntaxError" in ended.errors


def test_a_wrong_gradient_in_one_worker_is_named(tmp_path: Path) -> None:
    ended = broken("wrong-gradient-one-worker", tmp_path).canary()
    assert ended.code == 6
    found = failed(ended)
    assert ("gradients", 1) in found and ("gradients", 0) not in found
    (check,) = (c for c in ended.read("evidence.json")["checks"] if (c["id"], c["worker"]) == ("gradients", 1))
    assert "slots.1.bias" in check["summary"]
    assert not (ended.out / "rehearsal").exists()


def test_a_wrong_gradient_does_not_stop_a_run(tmp_path: Path) -> None:
    assert broken("wrong-gradient-one-worker", tmp_path).run().code == 0


def test_a_hang_ends_in_fail_with_every_stack(tmp_path: Path) -> None:
    ended = broken("worker-hangs", tmp_path).canary(canary_timeout_s=5)
    assert ended.code == 6
    assert failed(ended) == [("watchdog", None)]
    assert "compute" in ended.errors and ended.errors.count("most recent call first") >= 3


def test_a_dying_worker_is_named_with_its_traceback(tmp_path: Path) -> None:
    ended = broken("worker-dies", tmp_path).canary()
    assert ended.code == 6
    assert failed(ended) == [("worker", 1)]
    assert "this worker dies" in str(ended.read("evidence.json"))
    assert "[drafter-1] failed" in ended.errors


def test_an_abort_leaves_no_evidence(tmp_path: Path) -> None:
    ended = broken("process-aborts", tmp_path).canary()
    assert ended.code == -signal.SIGABRT
    assert not (ended.out / "evidence.json").exists()


def test_a_kill_leaves_no_evidence(tmp_path: Path) -> None:
    ended = broken("killed", tmp_path).canary()
    assert ended.code == -signal.SIGKILL
    assert not (ended.out / "evidence.json").exists()


def test_a_crash_in_a_control_asks_for_another_process_once(tmp_path: Path) -> None:
    crashing = broken("crashes-in-a-control-once", tmp_path)
    ready = crashing.ready()
    first, second = (crashing.trainer.call("canary", ready, name) for name in ("first", "second"))
    assert (first.code, first.read("evidence.json")["again"]) == (-signal.SIGABRT, "a control crashed")
    assert (second.code, second.read("evidence.json")["outcome"]) == (0, "pass")


def test_no_evidence_says_pass_by_its_exit_code_only(tmp_path: Path) -> None:
    ended = broken("no-evidence", tmp_path).canary()
    assert ended.code == 0
    assert not (ended.out / "evidence.json").exists()


def test_slow_steps_take_their_time(tmp_path: Path) -> None:
    ended = broken("slow-steps", tmp_path).run(steps=3)
    assert ended.code == 0
    times = [record["time"] for record in ended.records() if record["kind"] == "step"]
    assert times[-1] - times[0] >= 0.4


@pytest.mark.parametrize("verb", ["canary", "run"])
def test_fails_at_step_5_after_a_good_canary(tmp_path: Path, verb: str) -> None:
    fault = broken("fails-at-step-5", tmp_path)
    if verb == "canary":
        assert fault.canary().code == 0
        return
    ended = fault.run(steps=8, checkpoint_every=2)
    assert ended.code not in (0, 2, 6, 7, 20)
    assert "this run fails at step 5" in ended.errors and "[drafter-0] failed" in ended.errors
    assert [r["step"] for r in ended.records() if r["kind"] == "step"] == [1, 2, 3, 4]
    assert not (ended.out / "result.json").exists()


def test_a_run_that_does_not_stop_is_seen_by_the_canary(tmp_path: Path) -> None:
    ended = broken("does-not-stop", tmp_path).canary()
    assert ended.code == 6
    assert failed(ended) == [("sigterm", None)]
    # nor does it stop when it is a run
    fault = broken("does-not-stop", tmp_path / "run")
    assert fault.run().code == 0


def test_sigterm_can_be_ignored(tmp_path: Path) -> None:
    fault = broken("ignores-sigterm", tmp_path)
    settings = fault.ready(training={"steps": 10**6})
    with fault.trainer.started("run", settings, "run") as living:
        living.until(lambda: living.steps() >= 1)
        living.send(signal.SIGTERM)
        seen = living.steps()
        living.until(lambda: living.steps() > seen + 3)


def test_a_grandchild_outlives_the_run(tmp_path: Path) -> None:
    fault = broken("leaves-grandchild", tmp_path)
    mark = f"DFLASH_TEST_MARK={tmp_path}"
    command, _ = fault.trainer.command("run", fault.ready(), "run")
    environment = {**fault.trainer.environment(), "DFLASH_TEST_MARK": str(tmp_path)}
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    done = subprocess.run(command, cwd=fault.trainer.root, env=environment, check=False, **quiet)
    left = [pid for pid in _processes() if mark in _environment(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert done.returncode == 0
    assert len(left) == 1


def test_a_prepare_waits_half_way(tmp_path: Path) -> None:
    trainer = broken("prepare-waits", tmp_path).trainer
    settings = trainer.settings()
    with trainer.started("prepare", settings, "prepared") as living:
        living.until((living.out / "half.ndjson").exists)
        assert not (living.out / "prepare.json").exists()
        cache = Path(settings["cache"])
        cache.mkdir(exist_ok=True)
        (cache / "go").touch()
        assert living.end().code == 0
    assert json.loads((living.out / "prepare.json").read_text())["rows"] > 0


def _processes() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def _environment(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path: Path) -> None:
    ended = broken("non-finite-loss", tmp_path).run(steps=8)
    assert ended.code not in (0, 2, 6, 7, 20)
    assert "the loss is nan in worker 0 at step 5" in ended.errors
    assert [r["step"] for r in ended.records() if r["kind"] == "step"] == [1, 2, 3, 4]


def test_hangs_at_step_5_and_lives(tmp_path: Path) -> None:
    fault = broken("hangs-at-step-5", tmp_path)
    settings = fault.ready(training={"steps": 8})
    with fault.trainer.started("run", settings, "run") as living:
        living.until(lambda: living.steps() == 4)
        living.until(lambda: "threading.py" in _stacks(living) and "compute" in _stacks(living))
        assert living.steps() == 4


def _stacks(living: Living) -> str:
    living.send(signal.SIGUSR1)
    return living.errors.read_text()


def test_a_nan_in_the_metrics_alone_stops_nothing(tmp_path: Path) -> None:
    ended = broken("records-nan-at-step-5", tmp_path).run(steps=8)
    assert ended.code == 0
    losses = [record["loss"] for record in ended.records() if record["kind"] == "step"]
    assert [math.isnan(loss) for loss in losses] == [False] * 4 + [True] + [False] * 3
