"""`dflash-ops deploy` on this machine, with the tiny trainer: what a person gets, and what stops a bad run."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest

from tests.commands import TINY, Desk, eventually

STATES = [
    "built",
    "checked",
    "connected",
    "staged",
    "activated",
    "prepared",
    "verdict",
    "launched",
    "ended",
    "collected",
]


def processes_of(run: str) -> list[int]:
    """Every process that carries the run's mark."""
    return marked(f"DFLASH_OPS_RUN={run}")


def jobs_of(name: str) -> list[int]:
    """Every process of a canary or another verb."""
    return marked(f"DFLASH_OPS_JOB={name}")


def marked(text: str) -> list[int]:
    mark = text.encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def test_goes_from_build_to_collect(desk: Desk) -> None:
    done = desk.deploy()
    assert done.code == 0, done.out + done.err
    order = [event["event"] for event in done.events if event["event"] in STATES]
    assert order == STATES
    result = done.result
    assert result["exit"] == 0
    assert result["verdict"] == "pass"
    assert result["state"] == "SUCCEEDED"
    folder = desk.runs / result["run"]
    assert Path(result["folder"]) == folder.resolve()
    log = (folder / "log" / "000000.log").read_text()
    assert done.log == log.splitlines()
    records = [json.loads(line) for line in (folder / "metrics.ndjson").read_text().splitlines()]
    assert [record["step"] for record in records if record["kind"] == "step"] == list(range(1, 13))
    checkpoints = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert checkpoints == ["step-000004", "step-000008", "step-000012"]
    assert (folder / "checkpoints" / "step-000012" / "model.safetensors").stat().st_size > 0
    report = (folder / "report.md").read_text()
    assert re.search(r"- started: \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC\n", report)
    for words in (
        "SUCCEEDED",
        "- exit: code 0",
        result["release"],
        "first-slot acceptance",
        "tau",
        "step-000012",
        "pass",
    ):
        assert words in report
    kept = [json.loads(line) for line in (folder / "events.ndjson").read_text().splitlines()]
    assert [event["event"] for event in kept if event["event"] in STATES] == STATES
    assert not list(desk.folder.rglob("*.part")), "nothing half-made is left"
    assert not (desk.folder / "work" / "lock").exists()


def test_threads_trained_on_different_samples(desk: Desk) -> None:
    result = desk.deploy().result
    metrics = desk.runs / result["run"] / "metrics.ndjson"
    for line in metrics.read_text().splitlines():
        record = json.loads(line)
        if record["kind"] == "step":
            first, second = (set(map(str, worker["samples"])) for worker in record["workers"])
            assert first
            assert second
            assert not first & second


def test_without_a_change_no_bytes_are_sent_and_the_verdict_is_reused(desk: Desk) -> None:
    first, second = desk.deploy(), desk.deploy()
    assert first.named("staged")[0]["sent"] > 0
    assert second.code == 0
    assert second.named("staged")[0]["sent"] == 0
    (verdict,) = second.named("verdict")
    assert verdict["reused"]
    assert verdict["why"]
    assert first.result["release"] == second.result["release"]
    shown = desk.type("deploy", "--host", "box", "--playbook", "tiny")
    assert "no bytes sent" in shown.err
    assert "reused" in shown.err


def test_a_learning_rate_does_not_void_the_verdict_but_a_thread_does(desk: Desk) -> None:
    desk.deploy()
    assert desk.deploy("--set", "learning_rate=0.01").named("verdict")[0]["reused"]
    assert not desk.deploy("--set", "drafter_threads=3").named("verdict")[0]["reused"]


def test_another_content_of_the_target_voids_the_verdict(desk: Desk) -> None:
    target = desk.folder / "target.json"
    target.write_bytes((TINY / "target.json").read_bytes())
    desk.write_playbook(workload={"target": str(target)})
    assert desk.deploy().code == 0
    assert desk.deploy().named("verdict")[0]["reused"]
    target.write_text(target.read_text() + "\n")
    again = desk.deploy()
    assert again.code == 0, again.out
    assert not again.named("verdict")[0]["reused"]
    assert "target" in again.named("canary")[0]["why"]


def test_a_canary_whose_agent_was_killed_does_not_live_on(desk: Desk) -> None:
    desk.write_playbook("hanging", faults=("worker-hangs",), workload={"canary_timeout_s": 6000})
    work = desk.folder / "work"
    with desk.started("deploy", "--playbook", "hanging") as process:
        process.until_event("canary")
        eventually(lambda: bool(list(work.glob("canary/*/running.json"))))
        (marker,) = work.glob("canary/*/running.json")
        eventually(lambda: bool(jobs_of(marker.parent.name)))
        os.kill(json.loads(marker.read_text())["agent"]["pid"], signal.SIGKILL)
        process.rest()
        assert process.code == 7
    # the lock of a killed agent frees itself after three beats
    eventually(lambda: desk.deploy("--detach").code == 0)
    assert jobs_of(marker.parent.name) == []


def test_canary_again_runs_again(desk: Desk) -> None:
    first = desk.run("canary", "--playbook", "tiny")
    assert first.named("verdict")[0]["reused"] is False
    folder = Path(first.result["folder"])
    assert f"# Canary {folder.name}\n" in (folder / "report.md").read_text()
    # one name here, in the ledger and on the host
    assert desk.run("runs", "--all", host=False).result["runs"] == [folder.name]
    assert [path.name for path in (desk.folder / "work" / "canary").iterdir()] == [folder.name]
    assert desk.run("canary", "--playbook", "tiny").named("verdict")[0]["reused"] is True
    assert desk.run("canary", "--playbook", "tiny", "--again").named("verdict")[0]["reused"] is False


@pytest.mark.parametrize(
    ("fault", "code", "words"),
    [
        ("syntax-error", 3, "tiny_trainer/pipeline.py:"),
        ("wrong-gradient-one-worker", 6, "gradient"),
        ("worker-hangs", 6, "worker"),
        ("worker-dies", 6, ""),
        ("process-aborts", 6, "SIGABRT"),
        ("killed", 7, "SIGKILL"),
        ("no-evidence", 7, "evidence"),
    ],
)
def test_a_bad_trainer_launches_nothing(desk: Desk, fault: str, code: int, words: str) -> None:
    desk.write_playbook(faults=(fault,), workload={"canary_timeout_s": 5} if fault == "worker-hangs" else {})
    done = desk.deploy()
    assert done.code == code, done.out + done.err
    assert done.result["exit"] == code
    assert done.result["run"] is None
    assert not done.named("launched")
    assert words in json.dumps(done.error)
    assert desk.run("runs").result["runs"] == []
    if code == 3:
        return
    assert done.result["verdict"] == ("fail" if code == 6 else "inconclusive")
    kept = json.loads((Path(done.result["folder"]) / "verdict.json").read_text())
    assert kept["outcome"] == done.result["verdict"]


def test_a_canary_whose_process_crashed_in_a_control_is_tried_once_more_and_says_so(desk: Desk) -> None:
    desk.write_playbook(faults=("crashes-in-a-control-once",))
    shown = desk.type("deploy", "--host", "box", "--playbook", "tiny")
    assert shown.code == 0, shown.err
    told = [line for line in shown.err.splitlines() if line.startswith("canary ")]
    assert "once more, in a new process: a control crashed" in told[1]
    assert told[-1].startswith("canary   pass")


def test_a_wrong_gradient_names_its_worker_on_the_screen(desk: Desk) -> None:
    desk.write_playbook(faults=("wrong-gradient-one-worker",))
    shown = desk.type("deploy", "--host", "box", "--playbook", "tiny")
    failing = [line for line in shown.err.splitlines() if "fail" in line and "worker" in line]
    assert failing
    assert shown.code == 6
    assert "nothing was launched" in shown.err
    # a failed verdict is never reused as a pass, and never stops a later, better release
    assert desk.deploy().code == 6
    desk.write_playbook()
    assert desk.deploy().code == 0


def test_a_run_that_fails_is_exit_8_and_its_log_comes_home(desk: Desk) -> None:
    desk.write_playbook(faults=("fails-at-step-5",), workload={"rehearsal_steps": 2})
    done = desk.deploy()
    assert done.code == 8
    assert done.result["state"] == "FAILED"
    folder = desk.runs / done.result["run"]
    assert "Traceback" in (folder / "log" / "000000.log").read_text()
    assert (folder / "checkpoints" / "step-000004" / "manifest.json").exists()
    assert "FAILED" in (folder / "report.md").read_text()
    following = f"dflash-ops resume {done.result['run']}"
    shown = desk.type("status", "--host", "box").err
    assert shown.splitlines()[-1].startswith("  next")
    assert following in shown

    # the same for a person: the end of the log once, and what to type next once, at the end
    shown = desk.type("deploy", "--host", "box", "--playbook", "tiny")
    said = shown.out + shown.err
    assert said.count("Traceback") == 1
    assert said.count("  next ") == 1
    assert shown.err.splitlines()[-1].startswith("  next")


def test_skipping_the_canary_is_carried_for_ever(desk: Desk) -> None:
    refused = desk.type("deploy", "--host", "box", "--playbook", "tiny", "--skip-canary")
    assert refused.code == 2
    assert "--reason" in refused.err
    for words in (["--reason", "why"], ["--reason", " "], ["--skip-canary", "--reason", " "]):
        assert desk.deploy(*words).code == 2
    assert desk.run("runs").result["runs"] == []
    done = desk.deploy("--skip-canary", "--reason", "the vendor's <b>burn-in</b> ran")
    assert done.code == 0
    assert not done.named("verdict")
    assert done.result["verdict"] is None
    reason = "the vendor's <b>burn-in</b> ran"
    assert reason in (desk.runs / done.result["run"] / "report.md").read_text()
    assert desk.run("status").named("run")[0]["skipped_canary"] == reason
    assert reason in desk.type("runs", "--host", "box").err


def test_a_dry_run_refuses_what_cannot_be_a_release(desk: Desk) -> None:
    for name in ("zzz", "abc", "ABCDEF01", "", "current2"):
        refused = desk.deploy("--release", name, "--dry-run")
        assert (refused.code, refused.error["kind"]) == (2, "unknown_release"), name
        assert refused.named("plan") == []
    for name in ("current", "previous", "0123abcd"):
        assert desk.deploy("--release", name, "--dry-run").code == 0
    assert not (desk.folder / "work").exists()


def test_dry_run_touches_nothing(desk: Desk) -> None:
    before = sorted(path for path in desk.folder.rglob("*") if "home" not in path.parts)
    done = desk.deploy("--dry-run")
    assert done.code == 0
    stages = [step["stage"] for step in done.named("plan")[0]["steps"]]
    assert stages == [
        "build",
        "check",
        "connect",
        "stage",
        "doctor",
        "prepare",
        "canary",
        "launch",
        "follow",
        "collect",
    ]
    assert sorted(path for path in desk.folder.rglob("*") if "home" not in path.parts) == before


def test_a_second_deploy_is_refused_with_the_name_of_the_living_run(desk: Desk) -> None:
    desk.write_playbook("slow", faults=("slow-steps",), training={"steps": 5000})
    first = desk.deploy("--detach", playbook="slow")
    assert first.code == 0, first.out + first.err
    run = first.result["run"]
    second = desk.deploy()
    assert second.code == 8
    assert run in second.error["what"]
    status = desk.run("status").result
    assert (status["run"], status["state"]) == (run, "RUNNING")
    stopped = desk.run("stop")
    assert stopped.code == 0, stopped.out
    # the playbook's run.grace_s
    assert ", 60 s to write it" in stopped.named("phase")[0]["what"]
    assert stopped.result["state"] == "STOPPED"
    assert stopped.result["remaining"] == []
    assert processes_of(run) == []
    brought = desk.run("collect")
    assert brought.code == 0
    folder = desk.runs / run
    result = json.loads((folder / "result.json").read_text())
    assert result["outcome"] == "stopped"
    assert (folder / result["checkpoint"] / "manifest.json").exists()
    kept = [json.loads(line)["event"] for line in (folder / "events.ndjson").read_text().splitlines()]
    assert [name for name in kept if name in ("launched", "phase", "collected")] == [
        "launched",
        "phase",
        "phase",
        "collected",
    ]
    assert desk.deploy().code == 0


def test_stop_of_a_job_that_does_not_listen(desk: Desk) -> None:
    desk.write_playbook("deaf", faults=("ignores-sigterm", "slow-steps"), training={"steps": 5000})
    run = desk.deploy("--detach", playbook="deaf").result["run"]
    with desk.started("stop", "--grace", "1") as stopping:
        stopping.until_event("phase")
        stopping.kill(signal.SIGINT)
        notice, result = stopping.rest()
    # what was asked for is its host's to do
    assert f"its host goes on ending run {run}" in notice["text"]
    assert (result["exit"], result["run"]) == (130, run)
    assert desk.run("wait").result["state"] == "STOPPED"
    stopped = desk.run("stop", "--grace", "1")
    assert stopped.code == 0
    assert stopped.named("run")[0]["exit"]["forced"] is True
    assert "killed: it did not end within its grace" in desk.type("status", "--host", "box").err
    assert processes_of(run) == []


def test_stop_takes_grandchildren_along(desk: Desk) -> None:
    desk.write_playbook("family", faults=("leaves-grandchild", "slow-steps"), training={"steps": 5000})
    run = desk.deploy("--detach", playbook="family").result["run"]
    eventually(lambda: len(processes_of(run)) > 1)
    assert desk.run("stop").result["remaining"] == []
    assert processes_of(run) == []


def test_a_deploy_in_progress_holds_the_host(desk: Desk) -> None:
    desk.write_playbook("hanging", faults=("worker-hangs",), workload={"canary_timeout_s": 600})
    with desk.started("deploy", "--playbook", "hanging") as first:
        first.until_event("canary")
        second = desk.deploy()
        assert second.code == 9
        assert "deploy" in second.error["what"]
    # a killed client gives the lock up at once: the next deploy goes through
    eventually(lambda: not (desk.folder / "work" / "lock").exists())
    assert desk.deploy().code == 0


def test_interrupting_a_canary_leaves_no_verdict(desk: Desk) -> None:
    desk.write_playbook("hanging", faults=("worker-hangs",), workload={"canary_timeout_s": 600})
    with desk.started("deploy", "--playbook", "hanging") as process:
        process.until_event("canary")
        process.kill(signal.SIGINT)
        assert process.rest()[-1]["exit"] == process.code == 130
    eventually(lambda: not (desk.folder / "work" / "lock").exists())
    assert not list((desk.folder / "work" / "verdicts").glob("*.json"))
    assert desk.run("runs").result["runs"] == []


@pytest.mark.parametrize("stage", ["launched", "log", "progress"])
def test_killing_the_client_leaves_the_run(desk: Desk, stage: str) -> None:
    desk.write_playbook("slow", faults=("slow-steps",), training={"steps": 25})
    with desk.started("deploy", "--playbook", "slow") as process:
        process.until_event("launched")
        if stage != "launched":
            process.until_event(stage)
        process.kill()
    followed = desk.run("tail-logs", "-f", host=False)
    assert followed.code == 0
    assert followed.result["state"] == "SUCCEEDED"
    brought = desk.run("collect", host=False)
    assert brought.code == 0
    log = (desk.runs / brought.result["run"] / "log" / "000000.log").read_text().splitlines()
    assert followed.log == log
