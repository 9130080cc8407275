"""What a run brings home: complete checkpoints only, and no file that is not the run's."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from dflash_ops.agent.collect import unlisted
from dflash_ops.agent.runs import RunFolder
from tests.agent.client import Agent, AgentFailed, Packed, job


@pytest.fixture
def folder(agent: Agent, work: Path, staged: Packed) -> Path:
    """A run that has ended: runs/one."""
    agent.call("canary", **job(staged, evidence="pass"))
    agent.call("launch", run="one", **job(staged))
    assert agent.call("follow", run="one", wait=True).result["state"] == "SUCCEEDED"
    return work / "runs/one"


def listed(agent: Agent) -> dict[str, dict[str, object]]:
    return {item["path"]: item for item in agent.call("files", run="one").result["files"]}


def test_everything_of_a_run_is_listed_with_its_hash(agent: Agent, folder: Path) -> None:
    files = listed(agent)
    assert list(files) == [
        "run.json",
        "settings.json",
        "verdict.json",
        "exit.json",
        "log/000000.log",
        "out/metrics.ndjson",
        "out/result.json",
        "out/checkpoints/step-000003/model.safetensors",
        "out/checkpoints/step-000003/manifest.json",
    ]
    for path, item in files.items():
        data = (folder / path).read_bytes()
        assert (item["size"], item["sha256"]) == (len(data), hashlib.sha256(data).hexdigest())
        reply = agent.call("read", run="one", path=path, digest=True)
        assert reply.streams[0] == data
        assert reply.result == {"size": item["size"], "sha256": item["sha256"]}
    roles = {Path(path).name: item["role"] for path, item in files.items()}
    assert roles["model.safetensors"] == "weights"
    assert roles["manifest.json"] == "manifest"
    assert (roles["000000.log"], roles["metrics.ndjson"], roles["result.json"]) == ("growing", "growing", "record")


def test_tensorboards_files_are_listed_and_nothing_else_below_their_folder(agent: Agent, folder: Path) -> None:
    for path in ("train/events.out.tfevents.000000", "evaluation/events.out.tfevents.000001", "train/other", "plain"):
        (folder / "out/tensorboard" / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / "out/tensorboard" / path).write_bytes(path.encode())
    (folder / "out/tensorboard/train/events.out.tfevents.000002").symlink_to("/etc/passwd")
    (folder / "elsewhere").mkdir()
    (folder / "elsewhere/events.out.tfevents.000000").touch()
    (folder / "out/tensorboard/linked").symlink_to(folder / "elsewhere")
    found = {path: item["role"] for path, item in listed(agent).items() if "tensorboard" in path}
    assert found == {
        "out/tensorboard/train/events.out.tfevents.000000": "growing",
        "out/tensorboard/evaluation/events.out.tfevents.000001": "growing",
    }
    assert unlisted(RunFolder(folder)) == [
        "out/tensorboard/linked",
        "out/tensorboard/plain",
        "out/tensorboard/train/events.out.tfevents.000002",
        "out/tensorboard/train/other",
    ]


def test_what_grows_has_no_hash_while_the_run_goes_on(agent: Agent, staged: Packed) -> None:
    agent.call("launch", run="one", reason="test", **job(staged, forever=True))
    answer = agent.call("files", run="one").result
    assert answer["state"] == "RUNNING"
    assert {item["path"] for item in answer["files"] if item["sha256"] is None} == {"log/000000.log"}
    agent.call("stop", run="one", grace_s=60)
    answer = agent.call("files", run="one").result
    assert answer["state"] == "STOPPED"
    assert all(item["sha256"] for item in answer["files"])


def test_a_read_is_of_a_part(agent: Agent, folder: Path) -> None:
    data = (folder / "log/000000.log").read_bytes()
    for offset, length in ((5, None), (len(data), None), (5, 3), (0, len(data) + 10)):
        reply = agent.call("read", run="one", path="log/000000.log", offset=offset, length=length, digest=True)
        wanted = data[offset : None if length is None else offset + length]
        assert reply.streams[0] == wanted
        assert reply.result == {"size": len(data), "sha256": hashlib.sha256(wanted).hexdigest()}
    assert agent.call("read", run="one", path="log/000000.log").result["sha256"] is None
    with pytest.raises(AgentFailed, match="fewer than the offset"):
        agent.call("read", run="one", path="log/000000.log", offset=len(data) + 1)


def test_the_size_of_a_checkpoint_is_that_of_the_same_drafters_last_one(agent: Agent, folder: Path) -> None:
    def known(module: str = "tt", **workload: object) -> object:
        return agent.call("footprint", module=module, workload=workload).result["checkpoint"]

    # what its size does not depend on may differ
    assert known(anchors=7) == {"bytes": 100, "run": "one"}
    assert known(draft_layers=7) is None
    assert known("other") is None
    (folder / "out/checkpoints/step-000003/manifest.json").unlink()
    assert known() is None


@pytest.mark.parametrize("harm", ["no manifest", "half a file", "missing file", "part", "outside", "linked"])
def test_an_incomplete_checkpoint_is_not_there(agent: Agent, folder: Path, harm: str) -> None:
    checkpoints = folder / "out/checkpoints"
    checkpoint = checkpoints / "step-000003"
    weights = checkpoint / "model.safetensors"
    if harm == "no manifest":
        (checkpoint / "manifest.json").unlink()
    elif harm == "half a file":
        weights.write_bytes(b"w" * 50)
    elif harm == "missing file":
        weights.unlink()
    elif harm == "part":
        checkpoint.rename(checkpoints / "step-000003.part")
    elif harm == "outside":
        manifest = json.loads((checkpoint / "manifest.json").read_text())
        manifest["files"][0]["path"] = "../../../run.json"
        (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    elif harm == "linked":
        weights.rename(folder / "elsewhere")
        weights.symlink_to(folder / "elsewhere")
    assert not [path for path in listed(agent) if "checkpoints" in path]


@pytest.mark.parametrize(
    "path",
    ["../../events.ndjson", "/etc/passwd", "out/link", "out/folder/hosts", "out", "out/nothing", "out/half.part/x"],
)
def test_only_finished_regular_files_of_the_run_are_read(agent: Agent, folder: Path, path: str) -> None:
    (folder / "out/link").symlink_to("/etc/passwd")
    (folder / "out/folder").symlink_to("/etc")
    (folder / "out/half.part").mkdir()
    (folder / "out/half.part/x").touch()
    with pytest.raises(AgentFailed) as caught:
        agent.call("read", run="one", path=path)
    assert caught.value.kind == "file"
    assert not {"out/link", "out/folder"} & set(listed(agent))
