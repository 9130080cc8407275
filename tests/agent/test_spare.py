"""A full disk: the commands that lead out of it work."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.agent.client import Agent, AgentFailed


@pytest.fixture
def small_disk(work: Path) -> Iterator[Path]:
    """The work directory on a disk of its own."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    work.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=20m", "tmpfs", work]
    mounted = subprocess.run(mount, capture_output=True, check=False)
    if mounted.returncode != 0:
        pytest.skip(f"tmpfs cannot be mounted here: {mounted.stderr.decode()}")
    yield work
    subprocess.run(["umount", "--lazy", work], check=True)


def fill(folder: Path) -> None:
    with (folder / "filler").open("wb", buffering=0) as file:
        try:
            while file.write(b"f" * 4096):
                pass
        except OSError:
            pass


def test_what_makes_room_works_on_a_full_disk(small_disk: Path) -> None:
    with Agent(small_disk) as agent:
        agent.call("facts")
        old = small_disk / "cache" / "prepared" / "old"
        old.mkdir()
        (old / "prepare.json").write_text("{}")
        (old / "data").write_bytes(b"d" * 1_000_000)
        fill(small_disk)
        with pytest.raises(AgentFailed):
            agent.call("stage", digest="0" * 64, size=10_000, upload=b"x" * 10_000)
        agent.call("lock", owner="me@desk", command="prune")
        found = agent.call("prune", keep_runs=0, keep_releases=0, keep_prepared=0, collected=None).result["items"]
    assert [(item["name"], item["fate"]) for item in found] == [("old", "goes")]
    assert not old.exists()
