"""What a run can be continued from, and the link between it and its child."""

from __future__ import annotations

import hashlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.agent.client import Agent, AgentFailed, Packed, Reply, alive, eventually, job


def launch(agent: Agent, release: Packed, run: str, parent: str | None = None, **act: Any) -> dict[str, Any]:
    return agent.call("launch", run=run, parent=parent, reason="test", **job(release, **act)).result


def ended(agent: Agent, run: str) -> dict[str, Any]:
    return agent.call("wait", run=run).result


def resumable(agent: Agent, run: str | None = None) -> Reply:
    return agent.call("resumable", run=run)


def refused(agent: Agent, run: str) -> AgentFailed:
    with pytest.raises(AgentFailed) as caught:
        resumable(agent, run)
    return caught.value


def checkpoint(work: Path, run: str, step: int, weights: bytes = b"weights") -> Path:
    folder = work / "runs" / run / "out" / "checkpoints" / f"step-{step:06d}"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(weights)
    sha256 = hashlib.sha256(weights).hexdigest()
    listed = {"path": "model.safetensors", "size": len(weights), "sha256": sha256, "role": "weights"}
    (folder / "manifest.json").write_text(json.dumps({"v": 1, "kind": "checkpoint", "step": step, "files": [listed]}))
    return folder


def test_the_last_complete_checkpoint_with_the_runs_own_settings(agent: Agent, work: Path, staged: Packed) -> None:
    launch(agent, staged, "one")
    ended(agent, "one")
    result = resumable(agent).result
    assert (result["run"], result["state"], result["step"]) == ("one", "SUCCEEDED", 3)
    assert result["checkpoint"] == str(work / "runs/one/out/checkpoints/step-000003")
    assert (result["release"], result["module"], result["playbook"]) == (staged.digest, "tt", "trivial")
    assert result["settings"] == json.loads((work / "runs/one/settings.json").read_text())
    last = checkpoint(work, "one", 10)
    assert resumable(agent, "one").result["step"] == 10
    # what is being written, and what lost its manifest, does not exist
    checkpoint(work, "one", 11).rename(last.with_name("step-000011.part"))
    (checkpoint(work, "one", 12) / "manifest.json").unlink()
    (last.with_name("step-000013")).symlink_to(last)
    reply = resumable(agent, "one")
    assert (reply.result["step"], reply.events) == (10, [])


def test_after_a_stop_from_the_checkpoint_that_was_asked_for(agent: Agent, staged: Packed) -> None:
    launch(agent, staged, "one", forever=True)
    eventually(lambda: "ready" in agent.call("follow", run="one").log)
    agent.call("stop", run="one", grace_s=60)
    result = resumable(agent).result
    assert (result["state"], result["step"]) == ("STOPPED", 1)


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_taken(agent: Agent, work: Path, staged: Packed) -> None:
    launch(agent, staged, "one")
    ended(agent, "one")
    same_size, cut, outside = (checkpoint(work, "one", step) for step in (10, 11, 12))
    (same_size / "model.safetensors").write_bytes(b"Weights")
    (cut / "model.safetensors").write_bytes(b"w")
    manifest = (outside / "manifest.json").read_text()
    (outside / "manifest.json").write_text(manifest.replace("model.safetensors", "../step-000010/model.safetensors"))
    reply = resumable(agent, "one")
    assert reply.result["step"] == 3
    told = [(Path(event["path"]).name, event["why"]) for event in reply.events]
    assert [name for name, _ in told] == ["step-000012", "step-000011", "step-000010"]
    assert "has 1 bytes, not 7" in told[1][1]
    assert "sha256" in told[2][1]
    (work / "runs/one/out/checkpoints/step-000003/model.safetensors").unlink()
    error = refused(agent, "one")
    assert (error.kind, error.exit) == ("no_checkpoint", 8)
    assert len(error.error["evidence"]) == 4
    assert "dflash-ops deploy" in error.error["fix"]


def test_a_run_that_goes_on_is_not_resumed(agent: Agent, work: Path, staged: Packed) -> None:
    pid = launch(agent, staged, "one", forever=True)["pid"]
    eventually(lambda: "ready" in agent.call("follow", run="one").log)
    error = refused(agent, "one")
    assert (error.kind, error.exit) == ("alive", 8)
    assert "is running" in error.what
    supervisor = json.loads((work / "runs/one/state.json").read_text())["supervisor"]["pid"]
    os.kill(supervisor, signal.SIGKILL)
    eventually(lambda: agent.call("status", run="one").result["state"] == "LOST")
    # under systemd the unit takes the job along, elsewhere it lives on
    if alive(pid):
        error = refused(agent, "one")
        assert error.kind == "alive"
        assert "dflash-ops stop one" in error.error["fix"]
    agent.call("stop", run="one", grace_s=1)
    assert refused(agent, "one").kind == "no_checkpoint"


def test_parent_and_child_know_each_other(agent: Agent, work: Path, staged: Packed) -> None:
    launch(agent, staged, "one")
    before = ended(agent, "one")
    assert (before["parent"], before["next"]) == (None, None)
    with pytest.raises(AgentFailed) as caught:
        launch(agent, staged, "two", parent="nobody")
    assert caught.value.kind == "unknown_run"
    launch(agent, staged, "two", parent="one", exit=1)
    assert ended(agent, "two")["parent"] == "one"
    following = agent.call("status", run="one").result["next"]
    assert (following["kind"], following["outcome"], following["run"]) == ("resume", "started", "two")
    # a child that ended before it had a checkpoint of its own goes on from where it began
    (work / "runs/two/out/checkpoints/step-000003").rename(work / "gone")
    result = resumable(agent, "two").result
    assert result["checkpoint"] == str(work / "runs/one/out/checkpoints/step-000003")
