"""A client that is gone, by end of file or by silence, takes with it what it started, and nothing else."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dflash_ops.agent.conversation import Conversation
from dflash_ops.agent.errors import ClientGone
from dflash_ops.agent.files import exclusive
from dflash_ops.agent.workdir import WorkDir
from tests.agent.client import PATIENCE_S, SILENT_S, Agent, AgentFailed, Packed, Reply, alive, eventually, job


def started_canary(agent: Agent, release: Packed) -> tuple[int, int]:
    """A canary that would run for ever, and its grandchild in a session of its own: their pids."""
    agent.call("stage", digest=release.digest, size=len(release.archive), upload=release.archive)
    agent.call("lock", owner="ann@desk", command="canary")
    agent.ask("canary", timeout_s=600, **job(release, hang=True, grandchild=True))
    text = ""
    while "line 3" not in text:
        kind, payload, _ = agent.frame()
        text += payload.decode() if kind == b"D" else ""
    grandchild = int(text.split("grandchild is ")[1].split()[0])
    parent = int(Path(f"/proc/{grandchild}/stat").read_text().rpartition(")")[2].split()[1])
    assert alive(parent)
    assert alive(grandchild)
    return parent, grandchild


def is_locked(work: Path) -> bool:
    return (work / "lock").exists()


def test_end_of_file_kills_the_canary_and_releases_the_lock(work: Path, release: Packed) -> None:
    agent = Agent(work)
    pids = started_canary(agent, release)
    agent.close()
    eventually(lambda: not any(alive(pid) for pid in pids))
    assert not is_locked(work)
    assert list((work / "verdicts").glob("*.json")) == []


def test_how_a_job_ended_that_was_undone_says_nothing(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "_exit", lambda _code: None)
    conversation = Conversation(0, 1, WorkDir.open(str(work)), SILENT_S, "agent.pyz")
    with conversation.starting() as register:
        number, later = register(lambda: None), register(lambda: None)
    conversation.settle(number)
    conversation.close("end of file")
    with pytest.raises(ClientGone):
        conversation.settle(later)


def test_silence_of_three_beats_does_the_same(work: Path, release: Packed) -> None:
    agent = Agent(work, beat=SILENT_S)
    pids = started_canary(agent, release)
    agent.fall_silent()
    agent.process.wait(timeout=PATIENCE_S)
    eventually(lambda: not any(alive(pid) for pid in pids))
    assert not is_locked(work)
    agent.close()


def test_a_client_that_sends_beats_is_never_gone(work: Path) -> None:
    with Agent(work, beat=SILENT_S) as agent:
        silent = Agent(work, beat=SILENT_S)
        silent.fall_silent()
        silent.process.wait(timeout=PATIENCE_S)
        assert agent.call("facts").result["uid"] >= 0
        silent.close()


def test_a_terminated_agent_cleans_up_too(work: Path, release: Packed) -> None:
    agent = Agent(work)
    pids = started_canary(agent, release)
    agent.process.terminate()
    agent.process.wait(timeout=PATIENCE_S)
    eventually(lambda: not any(alive(pid) for pid in pids))
    assert not is_locked(work)
    agent.close()


def test_a_killed_agents_canary_is_cleared_by_the_next_and_left_no_verdict(work: Path, release: Packed) -> None:
    agent = Agent(work)
    pids = started_canary(agent, release)
    agent.process.kill()
    agent.process.wait()
    assert any(alive(pid) for pid in pids)
    with Agent(work) as following:
        eventually(lambda: lock_is_free(following))
        answer = following.call("verdict", **job(release)).result
        assert (answer["verdict"], answer["holds"]) == (None, False)
        following.call("canary", timeout_s=60, **job(release, evidence="pass"))
        assert not any(alive(pid) for pid in pids)
    agent.close()


def lock_is_free(agent: Agent) -> bool:
    try:
        agent.call("lock", owner="bob@lap", command="deploy")
    except AgentFailed as failed:
        assert failed.kind == "locked"
        return False
    return True


def test_an_oversized_frame_ends_the_conversation_with_a_reason(agent: Agent) -> None:
    agent.send(struct.pack(">cI", b"D", 9 * 1024 * 1024))
    _, payload, _ = agent.frame()
    answer = json.loads(payload)
    assert answer["error"]["kind"] == "protocol"
    assert "at most" in answer["error"]["what"]
    agent.process.wait(timeout=PATIENCE_S)


def test_a_torn_request_is_waited_for(agent: Agent) -> None:
    payload = json.dumps({"id": 7, "op": "runs"}).encode()
    wire = b"J" + struct.pack(">I", len(payload)) + payload
    for start in range(0, len(wire), 5):
        agent.send(wire[start : start + 5])
        time.sleep(0.01)
    assert agent.reply(7).result == {"runs": []}


@pytest.mark.parametrize(
    ("request_", "kind", "says"),
    [
        ({"op": "dance"}, "request", "no operation 'dance'"),
        ({"op": "stage", "size": 3}, "request", "digest"),
        ({"op": "stage", "digest": "../../etc", "size": 3}, "request", "64 lower-case hex digits"),
        ({"op": "status", "run": "../x"}, "request", "run must be"),
        ({"op": "status", "run": "nobody"}, "unknown_run", "no run 'nobody'"),
        ({"op": "probe", "python": "/nowhere/python"}, "python_missing", "/nowhere/python"),
    ],
)
def test_bad_requests_get_one_error_and_the_conversation_goes_on(
    shared: Agent, request_: dict, kind: str, says: str
) -> None:
    with pytest.raises(AgentFailed) as caught:
        shared.call(**request_)
    assert caught.value.kind == kind
    assert says in caught.value.what
    assert shared.call("runs").result == {"runs": []}


def test_a_missing_python_names_those_that_are_there(agent: Agent) -> None:
    with pytest.raises(AgentFailed) as caught:
        agent.call("probe", python="no-such-python")
    assert caught.value.exit == 5
    there = caught.value.error["evidence"]
    assert there
    assert all(Path(path).exists() for path in there)
    assert there[0] in caught.value.error["fix"]


def test_probe_sees_what_a_job_would_import(agent: Agent) -> None:
    found = agent.call("probe", python=sys.executable).result
    script = "import importlib.metadata as m; print(m.version('pytest'))"
    version = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.strip()
    assert found["packages"]["pytest"] == version
    assert found["version"] == ".".join(map(str, sys.version_info[:3]))
    assert list(found["packages"]) == sorted(found["packages"])
    assert agent.call("probe", python=sys.executable).result["digest"] == found["digest"]


def test_probe_finds_what_kernels_are_compiled_with(agent: Agent, tmp_path: Path) -> None:
    compiler = tmp_path / "my cc"
    compiler.write_text("#!/bin/sh\n")
    compiler.chmod(0o755)
    link = tmp_path / "mycc"
    link.symlink_to(compiler)
    tools = agent.call("probe", python=sys.executable, environment={"CC": f"{link} -O1"}).result["tools"]
    assert tools["c"] == str(link)
    assert tools["headers"] == (Path(tools["include"]) / "Python.h").exists()
    assert agent.call("probe", python=sys.executable, environment={"CC": "/nowhere"}).result["tools"]["c"] is None


def test_the_lock_names_its_owner_and_is_released_at_the_end(work: Path) -> None:
    with Agent(work) as first, Agent(work) as second:
        first.call("lock", owner="ann@desk", command="deploy --host ct200")
        with pytest.raises(AgentFailed) as caught:
            second.call("lock", owner="bob@lap", command="canary")
        assert caught.value.exit == 9
        assert "ann@desk" in caught.value.what
        assert "deploy --host ct200" in caught.value.what
        first.close()
        second.call("lock", owner="bob@lap", command="canary")


def test_without_the_lock_nothing_is_changed_while_another_holds_it(work: Path, release: Packed) -> None:
    with Agent(work) as first, Agent(work) as second:
        first.call("lock", owner="ann@desk", command="deploy")
        with pytest.raises(AgentFailed) as caught:
            second.call("stage", digest=release.digest, size=len(release.archive), upload=release.archive)
        assert caught.value.exit == 9
        assert second.call("runs").result == {"runs": []}


@pytest.mark.parametrize("change", [{"boot_id": "another"}, {"beat": -100.0}, {"beat": 1e12}])
def test_a_stale_lock_is_taken_over(work: Path, change: dict) -> None:
    with Agent(work, beat=60) as first, Agent(work) as second:
        first.call("lock", owner="ann@desk", command="deploy")
        path = work / "lock" / "owner.json"
        owner = json.loads(path.read_text())
        if change.get("beat", 0) < 0:
            change = {"beat": owner["beat"] - 3.1 * owner["beat_s"]}
        path.write_text(json.dumps({**owner, **change}))
        second.call("lock", owner="bob@lap", command="deploy")
        assert json.loads(path.read_text())["owner"] == "bob@lap"


def test_who_lost_the_lock_stops_at_once(work: Path) -> None:
    # the agent looks at its lock at each beat
    with Agent(work, beat=SILENT_S) as first:
        first.call("lock", owner="ann@desk", command="deploy")
        path = work / "lock" / "owner.json"
        with exclusive(work / ".guard"):
            path.write_text(json.dumps({**json.loads(path.read_text()), "token": "of another", "owner": "bob@lap"}))
        first.process.wait(timeout=PATIENCE_S)
        assert json.loads(path.read_text())["owner"] == "bob@lap"


def test_the_beat_keeps_a_lock_fresh(work: Path) -> None:
    with Agent(work, beat=SILENT_S) as first, Agent(work) as second:
        first.call("lock", owner="ann@desk", command="deploy")
        path = work / "lock" / "owner.json"
        taken = json.loads(path.read_text())["beat"]
        eventually(lambda: json.loads(path.read_text())["beat"] > taken)
        assert not lock_is_free(second)


def test_output_of_a_job_is_streamed_while_it_runs(agent: Agent, staged: Packed, tmp_path: Path) -> None:
    go = tmp_path / "go"

    def seen(reply: Reply) -> None:
        if b"holding\n" in reply.streams[0]:
            go.touch()

    number = agent.ask("canary", timeout_s=PATIENCE_S, **job(staged, hold=str(go), evidence="pass"))
    # it ends once we have read that it holds
    assert agent.reply(number, seen=seen).result["verdict"]["outcome"] == "pass"
