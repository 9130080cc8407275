"""Out of memory is told by what the kernel counted, not by a signal."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dflash_ops.agent import cgroup
from tests.agent.client import Agent, Packed, job

LIMIT_BYTES = 160 << 20


def own_group() -> Path | None:
    """Our folder in the hierarchy that limits memory, where there is one that can be seen."""
    v2 = cgroup.version() == 2
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "" if v2 else "memory" in controllers.split(","):
            folder = (cgroup.MOUNT if v2 else cgroup.MOUNT / "memory") / path.lstrip("/")
            return folder if folder.is_dir() else None
    return None


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A control group with little memory, made below the one that we are in."""
    parent = own_group()
    if os.geteuid() != 0 or parent is None:
        pytest.skip("making a control group needs root and its file system")
    group = parent / f"dflash-ops-test-{os.getpid()}"
    try:
        group.mkdir()
        name = "memory.max" if cgroup.version() == 2 else "memory.limit_in_bytes"
        (group / name).write_text(str(LIMIT_BYTES))
        swap = group / ("memory.swap.max" if cgroup.version() == 2 else "memory.memsw.limit_in_bytes")
        if swap.exists():
            swap.write_text("0" if cgroup.version() == 2 else str(LIMIT_BYTES))
    except OSError as error:
        if group.is_dir():
            group.rmdir()
        pytest.skip(f"no control group with a memory limit can be made here: {error}")
    yield group
    for _ in range(2000):
        for pid in (group / "cgroup.procs").read_text().split():
            os.kill(int(pid), signal.SIGKILL)
        try:
            group.rmdir()
            return
        except OSError:
            # its last processes are going
            time.sleep(0.05)
    raise AssertionError(f"{group} cannot be removed")


def inside(group: Path, argv: list[str]) -> list[str]:
    return ["sh", "-c", f'echo $$ >{group}/cgroup.procs && exec "$@"', "sh", *argv]


def test_a_job_that_the_kernel_kills_for_its_memory(work: Path, release: Packed, small_group: Path) -> None:
    with Agent(work, wrap=lambda argv: inside(small_group, argv)) as agent:
        agent.call("stage", digest=release.digest, size=len(release.archive), upload=release.archive)
        agent.call("launch", run="one", reason="test", policy={}, **job(release, eat=4 * LIMIT_BYTES >> 20))
        status = agent.call("follow", run="one", wait=True).result
        assert (status["state"], status["exit"]["signal"]) == ("OOM", int(signal.SIGKILL))
        assert status["exit"]["oom_kill"] >= 1
        # the same signal without a kill that was counted: the count before the run does not count
        agent.call("launch", run="two", reason="test", policy={}, **job(release, signal=int(signal.SIGKILL)))
        status = agent.call("follow", run="two", wait=True).result
        assert (status["state"], status["exit"]["oom_kill"]) == ("FAILED", 0)
