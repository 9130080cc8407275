"""How often the kernel's OOM killer struck in our control group."""

from __future__ import annotations

from pathlib import Path
from typing import Iterator, Optional

MOUNT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def version() -> int:
    return 2 if (MOUNT / "cgroup.controllers").exists() else 1


def _own_path(controller: str) -> Optional[str]:
    """Our path in the hierarchy of `controller` (v1) or in the unified one (v2, controller "")."""
    for line in MEMBERSHIP.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            return path
    return None


def _upwards(root: Path, path: str) -> Iterator[Path]:
    """The group's folder, then its parents: a leaf may have no memory controller, a container a shorter view."""
    folder = root / path.lstrip("/")
    while True:
        yield folder
        if folder == root:
            return
        folder = folder.parent


def oom_kills() -> Optional[int]:
    """`oom_kill` of the nearest group that counts it (v2 memory.events, v1 memory.oom_control); None if none does.

    `oom_kill`, not `oom`: the latter is charged to the parent when both share the limit (containerd PR 6323).
    """
    name, root, controller = (
        ("memory.events", MOUNT, "") if version() == 2 else ("memory.oom_control", MOUNT / "memory", "memory")
    )
    path = _own_path(controller)
    if path is None or ".." in path.split("/"):
        return None
    for folder in _upwards(root, path):
        try:
            lines = (folder / name).read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            key, _, value = line.partition(" ")
            if key == "oom_kill":
                return int(value)
    return None


def memory_limit_bytes() -> Optional[int]:
    """The smallest memory limit on the way up; None when there is none."""
    name, root, controller = (
        ("memory.max", MOUNT, "") if version() == 2 else ("memory.limit_in_bytes", MOUNT / "memory", "memory")
    )
    path = _own_path(controller)
    if path is None or ".." in path.split("/"):
        return None
    limits = []
    for folder in _upwards(root, path):
        try:
            limits.append(int((folder / name).read_text()))
        except (OSError, ValueError):
            continue
    return min(limits) if limits else None
