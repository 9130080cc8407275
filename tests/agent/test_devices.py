"""GPUs are what nvidia-smi says, and a workload gets those that it names."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.agent.client import Agent, AgentFailed, Packed, job

TWO_GPUS = """\
0, GPU-aaaa, NVIDIA H200, 143771, 10, 570.86.15
1, GPU-bbbb, NVIDIA H200, 143771, [N/A], 570.86.15
"""


def host_with(tmp_path: Path, work: Path, output: str, code: int = 0) -> Agent:
    """A host whose nvidia-smi prints this: no machine of ours has GPUs in such numbers and states."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "text").write_text(output)
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\ncat {folder}/text\nexit {code}\n")
    program.chmod(0o755)
    return Agent(work, environment={**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"})


def checked_devices(agent: Agent, release: Packed, **workload: object) -> str:
    arguments = job(release)
    arguments["settings"]["workload"] = workload
    return agent.call("check", **arguments).result["environment"]["CUDA_VISIBLE_DEVICES"]


def test_facts_list_gpus_and_driver(tmp_path: Path, work: Path) -> None:
    with host_with(tmp_path, work, TWO_GPUS) as agent:
        facts = agent.call("facts").result
    assert facts["driver"] == "570.86.15"
    assert facts["gpus"] == [
        {"index": index, "uuid": uuid, "name": "NVIDIA H200", "memory_bytes": 143771 << 20, "memory_used_bytes": used}
        for index, uuid, used in ((0, "GPU-aaaa", 10 << 20), (1, "GPU-bbbb", 0))
    ]


def test_a_workload_sees_the_gpus_it_names_by_uuid(tmp_path: Path, work: Path, release: Packed) -> None:
    with host_with(tmp_path, work, TWO_GPUS) as agent:
        agent.call("stage", digest=release.digest, size=len(release.archive), upload=release.archive)
        assert checked_devices(agent, release) == "GPU-aaaa,GPU-bbbb"
        assert checked_devices(agent, release, gpus="all") == "GPU-aaaa,GPU-bbbb"
        assert checked_devices(agent, release, gpus=[1, "GPU-aaaa"]) == "GPU-bbbb,GPU-aaaa"
        assert checked_devices(agent, release, gpus=[], require_cuda=False) == ""
        for wrong in ([2], ["GPU-cccc"], [True], "some"):
            with pytest.raises(AgentFailed) as caught:
                checked_devices(agent, release, gpus=wrong)
            assert (caught.value.kind, caught.value.exit) == ("gpus", 5)
            assert "0 = GPU-aaaa" in caught.value.what
            assert "1 = GPU-bbbb" in caught.value.what
        with pytest.raises(AgentFailed) as caught:
            checked_devices(agent, release, gpus=[0, "GPU-aaaa"])
        assert "twice" in caught.value.what


def test_no_gpu_and_a_workload_that_needs_one(tmp_path: Path, work: Path, release: Packed) -> None:
    said = "Failed to initialize NVML: Driver/library version mismatch\n"
    with host_with(tmp_path, work, said, code=18) as agent:
        agent.call("stage", digest=release.digest, size=len(release.archive), upload=release.archive)
        assert agent.call("facts").result["gpus"] == []
        with pytest.raises(AgentFailed) as caught:
            checked_devices(agent, release)
        assert (caught.value.kind, caught.value.exit) == ("no_gpu", 5)
        assert "version mismatch" in caught.value.what
        assert "require_cuda: false" in caught.value.error["fix"]
        assert checked_devices(agent, release, require_cuda=False) == ""


def test_runs_on_different_gpus_live_side_by_side(tmp_path: Path, work: Path, release: Packed) -> None:
    with host_with(tmp_path, work, TWO_GPUS) as agent:
        agent.call("stage", digest=release.digest, size=len(release.archive), upload=release.archive)
        for number in (0, 1):
            arguments = job(release, forever=True)
            arguments["settings"]["workload"] = {"gpus": [number]}
            agent.call("launch", run=f"on-{number}", reason="test", **arguments)
        with pytest.raises(AgentFailed) as caught:
            agent.call("launch", run="third", reason="test", **arguments)
        assert caught.value.kind == "busy"
        assert "on-1" in caught.value.what
        assert "GPU-bbbb" in caught.value.what
        states = {run["run"]: run["devices"] for run in agent.call("runs").result["runs"]}
        assert states == {"on-0": ["GPU-aaaa"], "on-1": ["GPU-bbbb"]}
        for name in states:
            assert agent.call("stop", run=name, grace_s=60).result["state"] == "STOPPED"
