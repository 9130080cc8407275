"""`launch` with a `key`: a run that prepares data. It lives, ends and goes on as any other run."""

from __future__ import annotations

import json
import os
import pwd
import signal
from pathlib import Path
from typing import Any

import pytest

from dflash_ops.agent.growth import Growth
from dflash_ops.agent.processes import Mark
from tests.agent.client import Agent, AgentFailed, Packed, Reply, eventually, job
from tests.agent.test_leases import GpuHost, on
from tests.agent.test_verbs import needs_root, public_work  # noqa: F401 -- a fixture

KEY = "k" * 16
POLICY = {"grace_s": 60, "probation_steps": 0}


@pytest.fixture
def host(tmp_path: Path, work: Path, release: Packed) -> GpuHost:
    """As in test_leases: a host with two GPUs."""
    made = GpuHost(tmp_path, work)
    with made.agent() as agent:
        agent.call("stage", digest=release.digest, size=len(release.archive), upload=release.archive)
    return made


def launch(agent: Agent, release: Packed, run: str = "one", *, policy: dict[str, Any] | None = None, **act: Any) -> Any:
    asked = {"policy": {**POLICY, **(policy or {})}, "key": KEY, "parent": act.pop("parent", None)}
    return agent.call("launch", run=run, **asked, **job(release, **act)).result


def follow(agent: Agent, run: str = "one") -> Reply:
    return agent.call("follow", run=run, wait=True)


def place(work: Path) -> Path:
    return work / "cache" / "prepared" / KEY


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def test_it_needs_no_verdict_and_its_data_are_found(agent: Agent, work: Path, staged: Packed) -> None:
    began = launch(agent, staged)
    assert began["prepares"] == str(place(work))
    reply = follow(agent)
    assert (reply.result["state"], reply.result["prepares"]) == ("SUCCEEDED", str(place(work)))
    # the contract: `run` is null in all verbs but `run`
    assert f"prepare of None in {work}/releases/{staged.digest}\n" in reply.log
    record = read(work / "runs/one/run.json")
    assert record["command"][-1] == str(place(work))
    assert (record["verdict"], record["skipped_canary"]) == (None, None)
    # what the trainer says of the data comes home with the run
    listed = {each["path"] for each in agent.call("files", run="one").result["files"]}
    assert "out/prepare.json" in listed
    assert read(work / "runs/one/out/prepare.json") == {"rows": 3}
    assert agent.call("prepare", key=KEY, **job(staged)).result == {"path": str(place(work)), "reused": True}
    with pytest.raises(AgentFailed) as caught:
        agent.call("launch", run="two", **job(staged))
    assert (caught.value.kind, caught.value.exit) == ("gate", 7)


def test_killed_with_its_supervisor_it_goes_on_where_it_was(agent: Agent, work: Path, staged: Packed) -> None:
    go = work.parent / "go"
    pid = launch(agent, staged, until=str(go))["pid"]
    eventually((place(work) / "data.json").exists)
    os.kill(read(work / "runs/one/state.json")["supervisor"]["pid"], signal.SIGKILL)
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: agent.call("status", run="one").result["state"] == "LOST")
    assert Mark.of_run(work, "one").kill(patience_s=120) == []
    point = agent.call("resumable", run="one").result
    assert (point["prepares"], point["checkpoint"], point["step"]) == (str(place(work)), None, 0)
    go.touch()
    launch(agent, staged, "two", parent="one", until=str(go))
    reply = follow(agent, "two")
    assert (reply.result["state"], reply.result["parent"]) == ("SUCCEEDED", "one")
    assert "found ['data.json']\n" in reply.log
    assert agent.call("status", run="one").result["next"]["run"] == "two"


def test_a_stop_keeps_what_there_is(agent: Agent, work: Path, staged: Packed) -> None:
    launch(agent, staged, until=str(work.parent / "never"))
    eventually((place(work) / "data.json").exists)
    reply = agent.call("stop", run="one")
    assert (reply.result["state"], reply.result["remaining"]) == ("STOPPED", [])
    said = [event["what"] for event in reply.events if event["event"] == "phase"]
    assert said[0] == f"asked to end; what it has prepared stays, in {place(work)}"
    # also where nothing has come to it for long: whoever has the run may go on with it
    for path in (place(work), *place(work).iterdir()):
        os.utime(path, (1, 1))
    limits = {f"keep_{name}": 0 for name in ("releases", "environments", "prepared", "assets")}
    for keep, fate in ((1, "stays"), (0, "goes")):
        items = agent.call("prune", keep_runs=keep, dry_run=True, **limits).result["items"]
        assert [each["fate"] for each in items if each["kind"] == "prepared"] == [fate]
    # a deploy's own `prepare` goes on with it as well
    assert "found ['data.json']\n" in agent.call("prepare", key=KEY, **job(staged)).log


def test_the_same_data_are_not_made_by_two(host: GpuHost, work: Path, release: Packed) -> None:
    go = work.parent / "go"
    with host.agent() as agent:
        agent.call("launch", run="one", key=KEY, policy=POLICY, **on([0], release, until=str(go)))
        for op, more in (("prepare", {}), ("launch", {"run": "two", "policy": POLICY})):
            with pytest.raises(AgentFailed) as caught:
                agent.call(op, key=KEY, **more, **on([1], release))
            assert (caught.value.kind, caught.value.exit) == ("busy", 8)
            assert "run one is preparing these data" in caught.value.what
            assert "dflash-ops stop one" in caught.value.error["fix"]
        # other data on the other GPU are no obstacle, and its own GPU is leased
        assert agent.call("prepare", key="o" * 16, **on([1], release)).result["reused"] is False
        with pytest.raises(AgentFailed) as caught:
            agent.call("free", **on([0], release))
        assert caught.value.error["evidence"]["owner"] == "one"
        with pytest.raises(AgentFailed) as caught:
            agent.call("resumable", run="one")
        assert caught.value.kind == "alive"
        go.touch()
        assert follow(agent).result["state"] == "SUCCEEDED"


def test_a_crash_is_started_again_by_its_host(agent: Agent, work: Path, staged: Packed) -> None:
    policy = {"restarts": 1, "restart_backoff_s": 0}
    launch(agent, staged, policy=policy, once=str(work.parent / "crashed"))
    first = agent.call("wait", run="one").result
    assert (first["state"], first["next"]["outcome"]) == ("FAILED", "started")
    second = first["next"]["run"]
    assert "-trivial-prepare-" in second
    reply = follow(agent, second)
    assert (reply.result["state"], reply.result["prepares"]) == ("SUCCEEDED", str(place(work)))
    assert "found ['data.json']\n" in reply.log


def test_an_exit_code_is_not_believed_without_the_data(agent: Agent, work: Path, staged: Packed) -> None:
    launch(agent, staged, policy={"restarts": 1}, lazy=True)
    status = follow(agent).result
    assert (status["state"], status["exit"]["code"]) == ("FAILED", 0)
    reason = status["exit"]["reason"]
    assert (reason["kind"], reason["what"]) == (
        "incomplete",
        "it ended with exit code 0 and left no whole prepare.json",
    )
    assert status["next"]["outcome"] == "refused"


def test_one_that_stands_still_is_ended_though_it_prints(agent: Agent, work: Path, staged: Packed) -> None:
    launch(agent, staged, policy={"first_step_s": 1, "stall_s": 1}, hang=True)
    reply = follow(agent)
    reason = reply.result["exit"]["reason"]
    assert (reply.result["state"], reason["kind"]) == ("FAILED", "stalled")
    assert "(stall_s is 1)" in reason["what"]


def test_what_grows_lives(tmp_path: Path) -> None:
    now = 0.0
    growth = Growth(tmp_path, stall_s=10, first_s=100, clock=lambda: now)
    now = 99.0
    assert growth.look() is None
    journal = tmp_path / "answers.ndjson"
    journal.write_text("one\n")
    # before it is called dead it is looked at
    now = 101.0
    assert growth.look() is None
    now = 200.0
    with journal.open("a") as file:
        file.write("two\n")
    assert growth.look() is None
    growth.excuse(50)
    now = 349.0
    assert growth.look() is None
    now = 350.0
    stalled = growth.look()
    assert stalled is not None
    assert stalled.what == "nothing was prepared for 100 s (first_step_s is 100)"
    for stall_s, first_s in ((0, 10), (10, 0)):
        # 0 is never
        growth = Growth(tmp_path, stall_s=stall_s, first_s=first_s, clock=lambda: now)
        now += 1e6
        assert growth.look() is None


@needs_root
def test_as_another_account(public_work: Path, release: Packed) -> None:  # noqa: F811
    nobody, python = pwd.getpwnam("nobody"), "/usr/bin/python3"
    if not Path(python).exists():
        pytest.skip("no python that every account can run")
    with Agent(public_work) as agent:
        agent.call("stage", digest=release.digest, size=len(release.archive), upload=release.archive)
        arguments = {"key": KEY, "policy": POLICY, "user": "nobody", **job(release, python=python)}
        agent.call("launch", run="one", **arguments)
        assert follow(agent).result["state"] == "SUCCEEDED"
    assert (place(public_work) / "prepare.json").stat().st_uid == nobody.pw_uid


def test_a_refusal_is_told_and_one_of_before_is_not(agent: Agent, work: Path, staged: Packed) -> None:
    told = {"what": "3 rows cannot be used", "where": "training.bad_prompts", "fix": "correct them"}
    launch(agent, staged, policy={"restarts": 1}, refused=told)
    status = follow(agent).result
    assert (status["state"], status["exit"]["code"]) == ("FAILED", 2)
    what = "the trainer refused: 3 rows cannot be used (training.bad_prompts)"
    assert status["exit"]["reason"] == {"kind": "refused", "what": what, "fix": "correct them"}
    # no file of its own is left: the last line of the log says it
    launch(agent, staged, "two", parent="one", refused=None)
    assert "3 rows" not in follow(agent, "two").result["exit"]["reason"]["what"]


def test_where_an_endpoint_answers_no_gpu_is_leased(host: GpuHost, work: Path, release: Packed) -> None:
    with host.agent() as agent:
        agent.call("launch", run="training", reason="test", **on([0, 1], release, forever=True))
        for hidden_states, busy in (("online", False), ("offline", True)):
            asked = on([0], release)
            asked["settings"]["workload"]["hidden_states"] = hidden_states
            asked["settings"]["training"]["engine"] = "openai"
            if busy:
                with pytest.raises(AgentFailed) as caught:
                    agent.call("launch", run="two", policy=POLICY, key=KEY[::-1] + "2", **asked)
                assert caught.value.kind == "busy"
                with pytest.raises(AgentFailed) as caught:
                    agent.call("prepare", key="m" * 16, timeout_s=60, **asked)
                assert caught.value.kind == "busy"
                continue
            agent.call("launch", run="one", policy=POLICY, key=KEY, **asked)
            assert follow(agent).result["devices"] == ["cpu"]
            record = read(work / "runs/one/run.json")
            assert record["environment"]["CUDA_VISIBLE_DEVICES"] == ""
            assert not agent.call("prepare", key="n" * 16, timeout_s=60, **asked).result["reused"]
        assert agent.call("stop", run="training", grace_s=5).result["remaining"] == []
