"""Out of memory is told by what the kernel counted, not by a signal."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dflash_ops.agent import cgroup
from tests.agent.client import Agent, Packed, Reply, eventually, job

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


class Counted:
    """Control groups in the form of v2, mounted over the real ones for one agent and all that it starts."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        (folder / "cgroup.controllers").write_text("memory\n")
        self._events = folder / "memory.events"
        self.tell(0)

    def tell(self, kills: int) -> None:
        self._events.write_text(f"low 0\nhigh 0\nmax 0\noom 0\noom_kill {kills}\noom_group_kill 0\n")

    def wrap(self, argv: list[str]) -> list[str]:
        # without /run no systemd is seen, whose units would live outside
        mounts = f"mount --bind {self._folder} {cgroup.MOUNT} && mount -t tmpfs tmpfs /run"
        return ["unshare", "--mount", "sh", "-c", f'{mounts} && exec "$@"', "sh", *argv]

    def tell_once_cleared_away(self, process: int, leader: int) -> None:
        """`leader` is killed; with the `process` that it leaves behind a kill is counted."""
        handle = os.pidfd_open(process)
        try:
            os.kill(leader, signal.SIGKILL)
            select.select([handle], [], [])
            self.tell(1)
        finally:
            os.close(handle)


@pytest.fixture
def counted(tmp_path: Path) -> Counted:
    folder = tmp_path / "groups"
    folder.mkdir()
    made = Counted(folder)
    if os.geteuid() != 0 or subprocess.run(made.wrap(["true"]), capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting over the control groups needs root and a namespace")
    return made


def grandchild_in(log: str) -> int:
    return int(log.partition("grandchild is ")[2].split(maxsplit=1)[0])


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_a_kill_while_a_run_is_cleared_away_is_not_what_ended_it(work: Path, release: Packed, counted: Counted) -> None:
    with Agent(work, wrap=counted.wrap) as agent:
        agent.call("stage", digest=release.digest, size=len(release.archive), upload=release.archive)
        act = {"grandchild": True, "forever": True}
        started = agent.call("launch", run="one", reason="test", policy={}, **job(release, **act)).result
        eventually(lambda: "ready" in agent.call("follow", run="one").log)
        counted.tell_once_cleared_away(grandchild_in(agent.call("follow", run="one").log), started["pid"])
        status = agent.call("follow", run="one", wait=True).result
        assert (status["state"], status["exit"]["signal"], status["exit"]["oom_kill"]) == ("FAILED", 9, 0)


@pytest.mark.parametrize("counts", [False, True])
def test_a_kill_while_a_canary_is_cleared_away_is_not_what_ended_it(
    work: Path, release: Packed, counted: Counted, counts: bool
) -> None:
    told: list[int] = []

    def kill_it(reply: Reply) -> None:
        if "line 0" not in reply.log or told:
            return
        grandchild = grandchild_in(reply.log)
        told.append(grandchild)
        if counts:
            counted.tell(1)
            os.kill(parent_of(grandchild), signal.SIGKILL)
        else:
            counted.tell_once_cleared_away(grandchild, parent_of(grandchild))

    with Agent(work, wrap=counted.wrap) as agent:
        agent.call("stage", digest=release.digest, size=len(release.archive), upload=release.archive)
        asked = agent.ask("canary", timeout_s=600, **job(release, hang=True, grandchild=True))
        verdict = agent.reply(asked, seen=kill_it).result["verdict"]
    summary = verdict["evidence"]["summary"]
    assert "was killed by SIGKILL" in summary
    assert ("out-of-memory kill" in summary) is counts
