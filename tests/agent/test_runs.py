"""A run belongs to the host: how it ends, how it is stopped, and what is known of it when nobody looks after it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from dflash_ops.agent.runs import RunState
from dflash_ops.agent.supervisor import end_state
from tests.agent.client import Agent, AgentFailed, Packed, Reply, alive, eventually, job


def launch(agent: Agent, release: Packed, run: str = "one", **act: Any) -> dict[str, Any]:
    return agent.call("launch", run=run, reason="test", policy={"grace_s": 60}, **job(release, **act)).result


def ended(agent: Agent, run: str = "one") -> dict[str, Any]:
    return agent.call("follow", run=run, wait=True).result


def wait_ready(agent: Agent, run: str = "one") -> None:
    eventually(lambda: "ready" in agent.call("follow", run=run).log)


@pytest.mark.parametrize(
    ("act", "state", "code", "number"),
    [
        ({}, "SUCCEEDED", 0, None),
        ({"exit": 1}, "FAILED", 1, None),
        ({"exit": 20}, "FAILED", 20, None),
        ({"signal": int(signal.SIGSEGV)}, "FAILED", None, int(signal.SIGSEGV)),
        ({"signal": int(signal.SIGKILL)}, "FAILED", None, int(signal.SIGKILL)),
    ],
)
def test_how_a_run_ended(
    agent: Agent, work: Path, staged: Packed, act: dict[str, Any], state: str, code: int | None, number: int | None
) -> None:
    launch(agent, staged, **act)
    status = ended(agent)
    assert (status["state"], status["exit"]["code"], status["exit"]["signal"]) == (state, code, number)
    assert status["exit"] == json.loads((work / "runs/one/exit.json").read_text())
    assert status["started"] <= status["ended"] <= time.time()
    assert status["last"]["step"] == 2
    assert (status["evidence"] is None) == (state == "SUCCEEDED")
    events = [json.loads(line) for line in (work / "events.ndjson").read_text().splitlines()]
    assert [event["event"] for event in events] == ["stage", "launch", "exit"]
    assert events[-1]["state"] == state


def test_only_a_counted_kill_is_out_of_memory() -> None:
    kill = int(signal.SIGKILL)
    assert end_state(None, kill, False, 1) is RunState.OOM
    assert end_state(None, kill, False, 0) is RunState.FAILED
    assert end_state(1, None, False, 1) is RunState.FAILED
    assert end_state(None, kill, True, 1) is RunState.STOPPED
    assert end_state(20, None, True, 0) is RunState.STOPPED
    assert end_state(0, None, True, 0) is RunState.SUCCEEDED


def test_a_module_that_is_not_there_fails_with_its_words(agent: Agent, staged: Packed) -> None:
    arguments = {**job(staged), "module": "nothing_here"}
    agent.call("launch", run="one", reason="test", **arguments)
    status = ended(agent)
    assert status["state"] == "FAILED"
    assert "No module named nothing_here" in status["evidence"][-1]


def test_a_python_that_cannot_be_started_is_an_error_at_once(
    agent: Agent, work: Path, staged: Packed, tmp_path: Path
) -> None:
    # answers the probe, and is gone when the supervisor wants it
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nrm "$0"\nexec {os.path.realpath("/proc/self/exe")} "$@"\n')
    python.chmod(0o755)
    with pytest.raises(AgentFailed) as caught:
        agent.call("launch", run="one", reason="test", **job(staged, python=str(python)))
    assert (caught.value.kind, caught.value.exit) == ("start", 8)
    assert str(python) in caught.value.what
    assert agent.call("status", run="one").result["state"] == "FAILED"


def test_a_run_outlives_its_client_and_the_next_finds_it(work: Path, release: Packed) -> None:
    with Agent(work) as agent:
        agent.call("lock", owner="ann@desk", command="deploy")
        agent.call("stage", digest=release.digest, size=len(release.archive), upload=release.archive)
        pid = launch(agent, release, forever=True)["pid"]
        agent.process.kill()
    with Agent(work) as agent:
        status = agent.call("status", run=None).result
        assert (status["run"], status["state"], status["pid"]) == ("one", "RUNNING", pid)
        assert alive(pid)
        assert Path(f"/proc/{pid}/fd/0").resolve() == Path("/dev/null")
        wait_ready(agent)
        assert agent.call("stop", run="one", grace_s=60).result["state"] == "STOPPED"


def test_a_busy_device_is_refused_with_the_runs_name(agent: Agent, staged: Packed) -> None:
    launch(agent, staged, forever=True)
    for op in ("launch", "canary", "free"):
        with pytest.raises(AgentFailed) as caught:
            agent.call(op, run="two", reason="test", **job(staged))
        assert (caught.value.kind, caught.value.exit) == ("busy", 8)
        assert "run one is running" in caught.value.what
    wait_ready(agent)
    agent.call("stop", run="one", grace_s=60)
    devices = agent.call("free", **job(staged)).result["devices"]
    assert devices == agent.call("status").result["devices"]
    launch(agent, staged, "two")
    assert [run["run"] for run in agent.call("runs").result["runs"]] == ["two", "one"]
    assert ended(agent, "two")["state"] == "SUCCEEDED"


def test_a_run_name_is_used_once(agent: Agent, staged: Packed) -> None:
    launch(agent, staged)
    ended(agent)
    with pytest.raises(AgentFailed) as caught:
        launch(agent, staged)
    assert caught.value.kind == "run_exists"


def test_stop_gets_a_checkpoint(agent: Agent, work: Path, staged: Packed) -> None:
    launch(agent, staged, forever=True)
    wait_ready(agent)
    reply = agent.call("stop", run="one", grace_s=60)
    assert [event["phase"] for event in reply.events] == ["asked", "verified"]
    assert (reply.result["state"], reply.result["exit"]["code"]) == ("STOPPED", 20)
    assert reply.result["exit"]["forced"] is False
    assert reply.result["remaining"] == []
    assert (work / "runs/one/out/checkpoints/step-000001/manifest.json").exists()
    again = agent.call("stop", run="one", grace_s=60)
    assert (again.result["state"], again.result["remaining"]) == ("STOPPED", [])


def test_stop_of_a_job_that_ignores_it(agent: Agent, staged: Packed) -> None:
    pid = launch(agent, staged, stubborn=True)["pid"]
    wait_ready(agent)
    reply = agent.call("stop", run="one", grace_s=0.5)
    assert [event["phase"] for event in reply.events] == ["asked", "killed", "verified"]
    assert "it did not end in 0.5 s and was killed" in reply.events[1]["what"]
    status = reply.result
    assert (status["state"], status["exit"]["signal"], status["exit"]["forced"]) == ("STOPPED", 9, True)
    assert status["remaining"] == []
    assert not alive(pid)


def test_sigterm_to_the_supervisor_is_a_stop(agent: Agent, work: Path, staged: Packed) -> None:
    launch(agent, staged, forever=True)
    wait_ready(agent)
    os.kill(supervisor_of(work), signal.SIGHUP)
    os.kill(supervisor_of(work), signal.SIGTERM)
    status = ended(agent)
    assert (status["state"], status["exit"]["code"]) == ("STOPPED", 20)


def supervisor_of(work: Path) -> int:
    return json.loads((work / "runs/one/state.json").read_text())["supervisor"]["pid"]


def test_what_a_job_leaves_behind_is_killed_before_it_counts_as_ended(agent: Agent, staged: Packed) -> None:
    launch(agent, staged, grandchild=True)
    reply = agent.call("follow", run="one", wait=True)
    assert reply.result["state"] == "SUCCEEDED"
    grandchild = int(reply.log.split("grandchild is ")[1].split()[0])
    assert not alive(grandchild)
    # nothing is written after the end
    assert agent.call("follow", run="one").log == reply.log


def test_a_killed_supervisor_is_a_lost_run_whose_processes_still_count(
    agent: Agent, work: Path, staged: Packed
) -> None:
    pid = launch(agent, staged, forever=True)["pid"]
    wait_ready(agent)
    os.kill(supervisor_of(work), signal.SIGKILL)
    eventually(lambda: agent.call("status", run="one").result["state"] == "LOST")
    # under systemd the unit takes the job along, elsewhere it lives on and holds its devices
    if alive(pid):
        with pytest.raises(AgentFailed) as caught:
            launch(agent, staged, "two")
        assert caught.value.kind == "busy"
        assert "lost its supervisor" in caught.value.what
    status = agent.call("stop", run="one", grace_s=1).result
    assert (status["state"], status["remaining"]) == ("LOST", [])
    assert not alive(pid)
    assert agent.call("follow", run="one", wait=True).result["state"] == "LOST"
    launch(agent, staged, "two")
    assert ended(agent, "two")["state"] == "SUCCEEDED"


def test_a_run_of_an_earlier_boot_or_of_a_reused_pid_is_lost(agent: Agent, work: Path, staged: Packed) -> None:
    launch(agent, staged)
    ended(agent)
    folder = work / "runs/one"
    (folder / "exit.json").unlink()
    state = json.loads((folder / "state.json").read_text())
    me = {"pid": os.getpid(), "start": int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])}
    for change, expected in (
        ({"supervisor": me}, "RUNNING"),
        ({"supervisor": me, "boot_id": "another"}, "LOST"),
        ({"supervisor": {**me, "start": me["start"] - 1}}, "LOST"),
    ):
        (folder / "state.json").write_text(json.dumps({**state, **change}))
        status = agent.call("status", run="one").result
        assert status["state"] == expected
        assert status["hint"] == ("its host has booted since" if "boot_id" in change else None)


def test_the_newest_run_is_the_last_that_began_whatever_the_clock_said(
    agent: Agent, work: Path, staged: Packed
) -> None:
    for run in ("one", "two", "three"):
        launch(agent, staged, run)
        ended(agent, run)
    record = work / "runs/one/run.json"
    # the clock was years ahead when it began, and was set right later
    record.write_text(json.dumps({**json.loads(record.read_text()), "started": time.time() + 1e8}))
    assert [run["run"] for run in agent.call("runs").result["runs"]] == ["three", "two", "one"]
    assert agent.call("status").result["run"] == "three"
    # a damaged record has its place by the clock
    (work / "runs/two/run.json").write_text("{")
    assert [run["run"] for run in agent.call("runs").result["runs"]][-1] == "one"


def test_a_supervisor_on_its_way_is_no_lost_run(agent: Agent, work: Path, staged: Packed) -> None:
    launch(agent, staged)
    ended(agent)
    folder = work / "runs/one"
    (folder / "exit.json").unlink()
    # as the launch left it, whose agent was killed before the supervisor had written of itself
    state = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps({**state, "supervisor": {"pid": 2**22, "start": 1}, "job": None}))
    # its own supervisor takes a moment to go
    eventually(lambda: agent.call("status", run="one").result["state"] == "LOST")
    starting = subprocess.Popen([sys.executable, "-c", "input()", "supervise", str(folder)], stdin=subprocess.PIPE)
    assert agent.call("status", run="one").result["state"] == "RUNNING"
    # whoever takes the lock leaves it the secrets that the launch left for it
    (folder / "secrets.json").write_text("{}")
    agent.call("lock", owner="ann@desk", command="deploy")
    assert (folder / "secrets.json").exists()
    agent.call("free_lock")
    starting.communicate(b"\n")
    agent.call("lock", owner="ann@desk", command="deploy")
    assert not (folder / "secrets.json").exists()
    assert agent.call("status", run="one").result["state"] == "LOST"


def test_followers_before_during_and_after_see_each_byte_once(work: Path, release: Packed) -> None:
    with Agent(work) as agent:
        agent.call("stage", digest=release.digest, size=len(release.archive), upload=release.archive)
        launch(agent, release, steps=40, pause=0.05)
        # from the beginning to the end, over a conversation that breaks in the middle
        first = Reply(None)
        cursors: dict[str, Any] = {}
        with Agent(work) as broken:

            def until_step_5(reply: Reply) -> None:
                if b"step 5" in reply.streams[0]:
                    raise ConnectionError

            number = broken.ask("follow", run="one", wait=True)
            try:
                broken.reply(number, seen=lambda reply: (first.streams.update(reply.streams), until_step_5(reply)))
            except ConnectionError:
                names = ("log", "metrics")
                cursors = {name: {"generation": 0, "offset": len(first.streams[n])} for n, name in enumerate(names)}
        rest = agent.call("follow", run="one", wait=True, cursors=cursors)
        after = agent.call("follow", run="one", wait=True)
    log = (work / "runs/one/log/000000.log").read_bytes()
    metrics = (work / "runs/one/out/metrics.ndjson").read_bytes()
    assert log.count(b"step ") == 40
    assert after.streams == {0: log, 1: metrics}
    assert {n: first.streams[n] + rest.streams[n] for n in (0, 1)} == after.streams
    assert rest.result["cursors"] == after.result["cursors"] == {
        "log": {"generation": 0, "offset": len(log)},
        "metrics": {"generation": 0, "offset": len(metrics)},
    }  # fmt: skip


def test_follow_without_waiting_ends_at_the_present_end(agent: Agent, staged: Packed) -> None:
    launch(agent, staged, forever=True)
    wait_ready(agent)
    first = agent.call("follow", run="one")
    assert first.result["state"] == "RUNNING"
    eventually(lambda: agent.call("follow", run="one", cursors=first.result["cursors"]).log)
    agent.call("stop", run="one", grace_s=60)
    rest = agent.call("follow", run="one", cursors=first.result["cursors"])
    assert rest.log.endswith("the last line\n")
    assert (first.log + rest.log).count("line 1\n") == 1


def test_rotated_and_replaced_files_are_announced(agent: Agent, work: Path, staged: Packed) -> None:
    launch(agent, staged)
    before = agent.call("follow", run="one", wait=True)
    (work / "runs/one/log/000001.log").write_text("second file\n")
    (work / "runs/one/out/metrics.ndjson").write_text("{}\n")
    reply = agent.call("follow", run="one", cursors=before.result["cursors"])
    assert reply.streams == {0: b"second file\n", 1: b"{}\n"}
    events = [{key: event[key] for key in ("event", "stream", "generation", "offset")} for event in reply.events]
    assert events == [
        {"event": "generation", "stream": "log", "generation": 1, "offset": 0},
        {"event": "generation", "stream": "metrics", "generation": 1, "offset": 0},
    ]
    assert reply.result["cursors"]["log"] == {"generation": 1, "offset": 12}
    assert agent.call("follow", run="one", cursors=reply.result["cursors"]).streams == {0: b"", 1: b""}
