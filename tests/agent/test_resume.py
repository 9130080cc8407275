"""What a run can be continued from, and the link between it and its child."""

from __future__ import annotations

import hashlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from dflash_ops.agent.files import remove_tree
from dflash_ops.agent.retention import pinned
from dflash_ops.agent.runs import RunFolder
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


def test_one_that_was_gone_on_with_names_the_furthest(agent: Agent, work: Path, staged: Packed) -> None:
    launch(agent, staged, "one")
    ended(agent, "one")
    launch(agent, staged, "two", parent="one", exit=1)
    ended(agent, "two")
    # its child came no further: at step 3 too
    assert resumable(agent, "one").result["step"] == 3
    launch(agent, staged, "three", parent="two")
    ended(agent, "three")
    checkpoint(work, "three", 9)
    for earlier in ("one", "two"):
        error = refused(agent, earlier)
        assert (error.kind, error.exit) == ("gone_on", 8)
        assert "run three, which is SUCCEEDED and has a checkpoint at step 9; its own last is at step 3" in error.what
        assert "dflash-ops resume three" in error.error["fix"]
        assert "to go back to step 3 all the same: dflash-ops deploy --playbook " in error.error["fix"]
        assert f"training.resume_from={work}/runs/{earlier}/out/checkpoints/step-000003" in error.error["fix"]
    assert resumable(agent, "three").result["step"] == 9
    launch(agent, staged, "four", parent="one", forever=True)
    error = refused(agent, "two")
    assert error.kind == "gone_on"
    error = refused(agent, "one")
    assert "run four, which is RUNNING" in error.what
    assert "dflash-ops tail-logs -f four" in error.error["fix"]
    eventually(lambda: "ready" in agent.call("follow", run="four").log)
    agent.call("stop", run="four", grace_s=20)


def test_after_a_loss_that_is_none_from_before_it(agent: Agent, work: Path, staged: Packed, tmp_path: Path) -> None:
    records = ['{"kind": "step", "step": 7, "loss": 1.5}\n', '{"kind": "step", "step": 9, "loss": NaN}\n']
    held = tmp_path / "held"
    launch(agent, staged, "one", hold=str(held), records=records, forever=True)
    good, doubtful, bad = (checkpoint(work, "one", step) for step in (7, 8, 9))
    held.touch()
    reason = ended(agent, "one")["exit"]["reason"]
    assert (reason["step"], reason["good_step"], reason["good_checkpoint"]) == (9, 7, str(good))
    reply = resumable(agent, "one")
    assert reply.result["checkpoint"] == str(good)
    assert [event["path"] for event in reply.events] == [str(bad), str(doubtful)]
    assert all("the last finite loss before it was at step 7" in event["why"] for event in reply.events)
    # the same for a run that is to begin with its weights; it is held as long as that one asks
    assert agent.call("checkpoint", run="one").result == {"run": "one", "path": str(good), "step": 7}
    assert pinned(RunFolder(work / "runs" / "one")) == {good.name}
    with pytest.raises(AgentFailed) as caught:
        agent.call("checkpoint", run="one", step=9)
    assert (caught.value.kind, caught.value.exit, caught.value.error["evidence"]) == ("no_checkpoint", 2, ["7"])
    remove_tree(good)
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
