from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from dflash_ops.agent.processes import marked
from tests.agent.client import Agent, Packed, trainer_release


@pytest.fixture
def work(tmp_path: Path) -> Iterator[Path]:
    """A work directory; whatever a failed test leaves running for it is killed."""
    folder = tmp_path / "work"
    yield folder
    for path in (folder / "runs").glob("*"):
        for pid in marked("DFLASH_OPS_RUN", path.name):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def agent(work: Path) -> Iterator[Agent]:
    with Agent(work) as conversation:
        yield conversation


@pytest.fixture
def release() -> Packed:
    return trainer_release()


@pytest.fixture
def staged(agent: Agent, release: Packed) -> Packed:
    """The trivial trainer, staged on the agent's host."""
    agent.call("stage", digest=release.digest, size=len(release.archive), upload=release.archive)
    return release
