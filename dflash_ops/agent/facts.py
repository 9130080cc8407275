"""What kind of host this is."""

from __future__ import annotations

import os
import pwd
import shutil
import sys
import time
from pathlib import Path
from typing import Any, Dict, Optional

from . import cgroup
from .arguments import Arguments
from .conversation import Conversation
from .devices import inventory, search_path
from .processes import boot_id, boottime_s
from .releases import linked, staged_releases


def runs_systemd() -> bool:
    """Whether PID 1 is systemd (sd_booted(3) asks for the same folder)."""
    return Path("/run/systemd/system").is_dir()


def can_start_units() -> bool:
    return runs_systemd() and os.geteuid() == 0 and shutil.which("systemd-run", path=search_path()) is not None


def _container() -> str:
    """The kind of container we are in (lxc, docker, …), or "none"."""
    for source in (Path("/run/systemd/container"), Path("/run/host/container-manager")):
        try:
            return source.read_text().strip()
        except OSError:
            continue
    try:
        environment = Path("/proc/1/environ").read_bytes().split(b"\0")
    except OSError:
        environment = []
    for item in environment:
        if item.startswith(b"container="):
            return item.partition(b"=")[2].decode("utf-8", "replace")
    return "docker" if Path("/.dockerenv").exists() else "none"


def _memory_bytes() -> int:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = cgroup.memory_limit_bytes()
    return total if limit is None else min(total, limit)


def _user_name(uid: int) -> Optional[str]:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return None


def op_facts(conversation: Conversation, _: Arguments) -> Dict[str, Any]:
    disk = os.statvfs(conversation.work.root)
    found = inventory()
    return {
        "hostname": os.uname().nodename,
        "user": _user_name(os.geteuid()) or str(os.geteuid()),
        "uid": os.geteuid(),
        "boot_id": boot_id(),
        "boottime_s": boottime_s(),
        "time": time.time(),
        "python": sys.version.split()[0],
        "python_executable": sys.executable,
        "kernel": os.uname().release,
        "systemd": runs_systemd(),
        "cgroup": cgroup.version(),
        "workdir": str(conversation.work.root),
        "releases": staged_releases(conversation.work),
        "current": linked(conversation.work.root / "current"),
        "previous": linked(conversation.work.root / "previous"),
        "disk_free_bytes": disk.f_bavail * disk.f_frsize,
        "inodes_free": disk.f_favail,
        "memory_bytes": _memory_bytes(),
        "cpus": len(os.sched_getaffinity(0)),
        "container": _container(),
        "gpus": [gpu.to_json() for gpu in found.gpus],
        "driver": found.driver,
        "gpu_problem": found.problem,
    }
