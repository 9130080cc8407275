"""`deploy --detach`: leaving a run alone is safe once it has made its first steps."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from tests.commands import Desk, Running, eventually


def agent_of(command: Running) -> int:
    """The process on the other end of the link: here a child of the command."""
    found: list[int] = []

    def find() -> bool:
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                agent = b"serve" in (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if parent == command.process.pid and agent:
                found.append(int(entry.name))
        return bool(found)

    eventually(find)
    return found[0]


def told(events: list[dict[str, Any]]) -> list[tuple[int, int | None]]:
    return [(event["done"], event["step"]) for event in events if event["event"] == "probation"]


def test_success_is_said_after_the_first_steps(desk: Desk) -> None:
    desk.write_playbook(faults=("slow-steps",), training={"steps": 5000}, run={"probation_steps": 2})
    done = desk.deploy("--detach")
    assert done.code == 0, done.out + done.err
    assert told(done.events) == [(0, None), (1, 1), (2, 2)]
    assert done.result["state"] == "RUNNING"
    assert not done.log
    stopped = desk.run("stop", done.result["run"])
    assert stopped.result["state"] == "STOPPED"


def test_a_shorter_run_may_end_well(desk: Desk) -> None:
    desk.write_playbook(training={"steps": 4}, run={"probation_steps": 50})
    done = desk.deploy("--detach")
    assert done.code == 0, done.out + done.err
    assert done.result["state"] == "SUCCEEDED"


def test_a_bad_end_is_an_error_with_the_end_of_its_log(desk: Desk) -> None:
    desk.write_playbook(faults=("fails-at-step-5",), workload={"rehearsal_steps": 2}, run={"probation_steps": 50})
    done = desk.deploy("--detach")
    assert done.code == 8
    assert done.error["kind"] == "probation"
    assert done.result["state"] == "FAILED"
    assert "FAILED in its probation, after 4 of 50 steps" in done.error["what"]
    assert any("this run fails at step 5" in line for line in done.error["evidence"])
    assert f"dflash-ops tail-logs {done.result['run']}" in done.error["fix"]


def test_a_cut_link_is_met_again_and_an_interrupt_leaves_the_run_alone(desk: Desk) -> None:
    desk.write_playbook(faults=("slow-steps",), training={"steps": 5000}, run={"probation_steps": 5000})
    with desk.started("deploy", "--detach", "--playbook", "tiny") as command:
        run = command.until_event("launched")["run"]
        command.until_event("probation")
        assert command.until_event("probation")["done"] == 1
        os.kill(agent_of(command), signal.SIGKILL)
        assert "the run goes on" in command.until_event("link_lost")["then"]
        met = [command.until_event("probation") for _ in range(3)]
        # those before may have been read already; from here on each step comes once
        assert [event["done"] - met[0]["done"] for event in met] == [0, 1, 2]
        assert all(event["step"] == event["done"] for event in met)
        command.kill(signal.SIGINT)
        events = command.rest()
        assert command.code == 130
    (notice,) = [event["text"] for event in events if event["event"] == "notice"]
    assert f"dflash-ops tail-logs -f {run}" in notice
    assert desk.run("status", run).result["state"] == "RUNNING"
    assert desk.run("stop", run).result["state"] == "STOPPED"
