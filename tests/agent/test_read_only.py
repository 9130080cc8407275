"""A disk that goes read-only under a run, as a damaged one does: what leads out of it works."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.agent.client import Agent, AgentFailed, Packed, alive, eventually, job


@contextmanager
def read_only(work: Path) -> Iterator[None]:
    """As after the kernel's own remount: what is open for writing stays so, nothing else is."""
    if os.geteuid() != 0:
        pytest.skip("a read-only mount needs root")
    mounted = subprocess.run(["mount", "--bind", work, work], capture_output=True, check=False)
    if mounted.returncode != 0:
        pytest.skip(f"bind mounts are not allowed here: {mounted.stderr.decode()}")
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", work], check=True)
        yield
    finally:
        subprocess.run(["umount", "--lazy", work], check=True)


def test_a_run_is_stopped_and_its_checkpoints_are_read(agent: Agent, work: Path, staged: Packed) -> None:
    agent.call("launch", run="one", reason="test", **job(staged, forever=True))
    eventually(lambda: "ready" in agent.call("follow", run="one").log)
    checkpoint = work / "runs/one/out/checkpoints/step-000001"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text('{"v": 1, "kind": "checkpoint", "step": 1, "files": []}')
    pid = int(agent.call("status", run="one").result["pid"])
    with read_only(work), Agent(work) as other:
        assert other.call("status", run="one").result["state"] == "RUNNING"
        assert other.call("pin", run="one", checkpoints=[checkpoint.name]).result["pinned"] == [checkpoint.name]
        path = f"out/checkpoints/{checkpoint.name}/manifest.json"
        assert b"checkpoint" in other.call("read", run="one", path=path).streams[0]
        assert other.call("stop", run="one", grace_s=5).result["remaining"] == []
        assert not alive(pid)
        with pytest.raises(AgentFailed, match="Read-only"):
            other.call("lock", owner="me@desk", command="deploy")
