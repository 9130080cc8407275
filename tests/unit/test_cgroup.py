"""Counted out-of-memory kills, from the files of both versions of control groups.

The v1 files were recorded from a real system (Linux 6.18, a group with a limit, after a real kill in it); that a real
kill there is seen is tests/agent/test_oom.py. The v2 files are not recorded: they are written in the form of the
kernel's documentation (admin-guide/cgroup-v2), and what of them is read has never met a v2 kernel in these tests.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_ops.agent import cgroup

V1_MEMBERSHIP = """\
9:name=systemd:/
8:pids:/
7:blkio:/
6:freezer:/
5:devices:/
4:memory:/process_api/af3214ce26bfb6fc3c0df20e353d0a1e
3:cpuset:/
2:cpuacct:/
1:cpu:/
0::/
"""
V1_AFTER_A_KILL = "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n"
V1_BEFORE = "oom_kill_disable 0\nunder_oom 0\noom_kill 0\n"

V2_MEMBERSHIP = "0::/system.slice/dflash-ops-one.service\n"
V2_AFTER_A_KILL = "low 0\nhigh 0\nmax 138\noom 0\noom_kill 1\noom_group_kill 0\n"
V2_PARENT_AFTER = "low 0\nhigh 0\nmax 138\noom 3\noom_kill 2\noom_group_kill 0\n"


class Groups:
    """A file system of control groups in a folder."""

    def __init__(self, folder: Path) -> None:
        self.mount = folder / "cgroup"
        self.mount.mkdir()
        self.membership = folder / "membership"

    def write(self, path: str, text: str) -> None:
        file = self.mount / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Groups:
    made = Groups(tmp_path)
    monkeypatch.setattr(cgroup, "MOUNT", made.mount)
    monkeypatch.setattr(cgroup, "MEMBERSHIP", made.membership)
    return made


def test_v1_counts_in_the_group_of_the_memory_controller(groups: Groups) -> None:
    groups.membership.write_text(V1_MEMBERSHIP)
    groups.write("memory/memory.oom_control", V1_BEFORE)
    groups.write("memory/process_api/af3214ce26bfb6fc3c0df20e353d0a1e/memory.oom_control", V1_AFTER_A_KILL)
    assert (cgroup.version(), cgroup.oom_kills()) == (1, 1)


def test_v1_in_a_container_that_sees_a_shorter_hierarchy(groups: Groups) -> None:
    groups.membership.write_text(V1_MEMBERSHIP)
    groups.write("memory/memory.oom_control", V1_AFTER_A_KILL)
    assert cgroup.oom_kills() == 1


def test_v2_counts_oom_kill_and_not_oom(groups: Groups) -> None:
    groups.membership.write_text(V2_MEMBERSHIP)
    groups.write("cgroup.controllers", "cpuset cpu io memory hugetlb pids rdma misc\n")
    groups.write("system.slice/memory.events", V2_PARENT_AFTER)
    groups.write("system.slice/dflash-ops-one.service/memory.events", V2_AFTER_A_KILL)
    assert (cgroup.version(), cgroup.oom_kills()) == (2, 1)


def test_v2_walks_up_from_a_leaf_without_a_memory_controller(groups: Groups) -> None:
    groups.membership.write_text(V2_MEMBERSHIP)
    groups.write("cgroup.controllers", "memory\n")
    groups.write("system.slice/memory.events", V2_PARENT_AFTER)
    groups.write("system.slice/dflash-ops-one.service/cgroup.procs", "1\n")
    assert cgroup.oom_kills() == 2


@pytest.mark.parametrize("membership", ["0::/../outside\n", "1:cpu:/\n", ""])
def test_what_cannot_be_seen_is_not_counted(groups: Groups, membership: str) -> None:
    groups.membership.write_text(membership)
    groups.write("cgroup.controllers", "memory\n")
    assert cgroup.oom_kills() is None
