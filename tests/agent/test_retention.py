"""The supervisor keeps the last checkpoints of its run, and those that an agent is sending."""

from __future__ import annotations

import json
from pathlib import Path

from tests.agent.client import Agent, Packed, eventually, job


def save(checkpoints: Path, step: int) -> None:
    """As the trainer does: built beside, renamed when whole."""
    part = checkpoints / f"step-{step:06d}.part"
    part.mkdir(parents=True)
    (part / "model.safetensors").write_bytes(b"w")
    entry = {"path": "model.safetensors", "size": 1, "sha256": "0" * 64, "role": "weights"}
    (part / "manifest.json").write_text(json.dumps({"v": 1, "kind": "checkpoint", "step": step, "files": [entry]}))
    part.rename(part.with_suffix(""))


def test_while_a_run_goes_on(agent: Agent, work: Path, staged: Packed) -> None:
    policy = {"keep_last": 1, "keep_best": 0}
    agent.call("launch", run="one", reason="test", policy=policy, **job(staged, forever=True))
    checkpoints = work / "runs/one/out/checkpoints"

    def there() -> set[str]:
        return {path.name for path in checkpoints.iterdir()}

    save(checkpoints, 10)
    with Agent(work) as reader:
        pinned = reader.call("pin", run="one", checkpoints=["step-000010", "step-000099"]).result["pinned"]
        assert pinned == ["step-000010"]
        for step in (11, 12):
            save(checkpoints, step)
        eventually(lambda: there() == {"step-000010", "step-000012"})
        # its reader dies without a word
        reader.process.kill()
        reader.process.wait()
        eventually(lambda: there() == {"step-000012"})
    agent.call("pin", run="one", checkpoints=["step-000012"])
    save(checkpoints, 13)
    (checkpoints / "step-000014.part").mkdir()
    agent.call("pin", run="one", checkpoints=[])
    eventually(lambda: there() == {"step-000013", "step-000014.part"})
    eventually(lambda: "ready" in agent.call("follow", run="one").log)
    # it saves once more (step 1) and leaves what it had half written
    assert agent.call("stop", run="one", grace_s=60).result["state"] == "STOPPED"
    assert there() == {"step-000013"}
    assert not (work / "runs/one/trash").exists()
