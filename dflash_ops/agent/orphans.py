"""Jobs whose agent was killed: found by the marker that each job's folder holds, ended, and cleared away."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Dict, List

from .files import read_json, remove_tree, write_json
from .processes import Mark, ProcessId, boot_id
from .workdir import WorkDir

MARKER = "running.json"


def mark_running(folder: Path, devices: List[str]) -> None:
    """Written before a job starts; taken away when it has been dealt with."""
    agent = ProcessId.of(os.getpid())
    value = {"boot_id": boot_id(), "devices": devices, "agent": agent.to_json() if agent else None}
    write_json(folder / MARKER, value)


def running_canaries(work: WorkDir) -> Dict[str, List[str]]:
    """Canaries of other agents that live: name to devices."""
    found = {}
    for marker in work.canaries.glob(f"*/{MARKER}"):
        value = read_json(marker) or {}
        agent = ProcessId.from_json(value.get("agent"))
        if agent is not None and agent.pid != os.getpid() and value.get("boot_id") == boot_id() and agent.alive:
            found[marker.parent.name] = [str(device) for device in value.get("devices", [])]
    return found


def clear_orphans(work: WorkDir) -> None:
    """Ends every job whose agent is gone, so that the devices are free and nothing writes any more.

    To be called by the holder of the lock.
    """
    for marker in [*work.scratch.glob(f"*/{MARKER}"), *work.canaries.glob(f"*/{MARKER}")]:
        value, folder = read_json(marker) or {}, marker.parent
        agent = ProcessId.from_json(value.get("agent"))
        if value.get("boot_id") == boot_id() and agent is not None and agent.alive:
            continue
        Mark.of_job(work.root, folder.name).kill()
        if folder.parent == work.scratch:
            remove_tree(folder)
        else:
            marker.unlink(missing_ok=True)
    _forget_secrets(work)


def _forget_secrets(work: WorkDir) -> None:
    """A launch that was killed half-way leaves the secrets that its supervisor was to take."""
    for file in work.runs.glob("*/secrets.json"):
        state = read_json(file.with_name("state.json")) or {}
        keeper = ProcessId.from_json(state.get("supervisor"))
        if state.get("boot_id") != boot_id() or keeper is None or not keeper.alive:
            file.unlink(missing_ok=True)
