from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from dflash_ops.agent.processes import Mark
from tests.agent.client import Agent, Packed, trainer_release


@pytest.fixture
def work(tmp_path: Path) -> Iterator[Path]:
    """A work directory; whatever a failed test leaves running for it is killed."""
    folder = tmp_path / "work"
    yield folder
    for path in (folder / "runs").glob("*"):
        Mark.of_run(folder, path.name).kill()


@pytest.fixture
def small_disk(request: pytest.FixtureRequest, work: Path) -> Iterator[Path]:
    """The work directory on a disk of its own: 3 MB, or what the test says."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    work.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={getattr(request, 'param', '3m')}", "tmpfs", work]
    mounted = subprocess.run(mount, capture_output=True, check=False)
    if mounted.returncode != 0:
        pytest.skip(f"tmpfs cannot be mounted here: {mounted.stderr.decode()}")
    yield work
    subprocess.run(["umount", "--lazy", work], check=True)


@pytest.fixture
def agent(work: Path) -> Iterator[Agent]:
    with Agent(work) as conversation:
        yield conversation


@pytest.fixture(scope="module")
def shared_work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shared") / "work"


@pytest.fixture(scope="module")
def shared(shared_work: Path) -> Iterator[Agent]:
    """One conversation for many tests that leave nothing behind."""
    with Agent(shared_work) as conversation:
        yield conversation


@pytest.fixture
def release() -> Packed:
    return trainer_release()


@pytest.fixture
def staged(agent: Agent, release: Packed) -> Packed:
    """The trivial trainer, staged on the agent's host."""
    agent.call("stage", digest=release.digest, size=len(release.archive), upload=release.archive)
    return release
