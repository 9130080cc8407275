"""Jobs of conversations (check, prepare, tune, canary): which live, and what is left of those whose agent is gone."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import List, Optional

from .files import read_json, remove_tree, write_json
from .processes import Mark, ProcessId, boot_id, process_with
from .workdir import WorkDir

MARKER = "running.json"


@dataclass(frozen=True)
class RunningJob:
    """A job as its marker tells it; `since` is Unix time, `devices` is empty where it may use none."""

    folder: Path
    verb: str
    devices: List[str]
    since: Optional[float]
    agent: ProcessId
    playbook: Optional[str]

    @property
    def name(self) -> str:
        return self.folder.name


def mark_running(folder: Path, verb: str, devices: List[str], playbook: Optional[str]) -> None:
    """Written before a job starts; taken away when it has been dealt with."""
    agent = ProcessId.of(os.getpid())
    value = {
        "boot_id": boot_id(),
        "verb": verb,
        "devices": devices,
        "since": time.time(),
        "agent": agent.to_json() if agent else None,
        "playbook": playbook,
    }
    write_json(folder / MARKER, value)


def _markers(work: WorkDir) -> List[Path]:
    return [*work.scratch.glob(f"*/{MARKER}"), *work.canaries.glob(f"*/{MARKER}")]


def _living(marker: Path) -> Optional[RunningJob]:
    """The job, if its agent lives in this boot."""
    value = read_json(marker) or {}
    agent = ProcessId.from_json(value.get("agent"))
    if agent is None or value.get("boot_id") != boot_id() or not agent.alive:
        return None
    devices = [str(device) for device in value.get("devices", [])]
    verb, since, playbook = str(value.get("verb", "job")), value.get("since"), value.get("playbook")
    return RunningJob(marker.parent, verb, devices, since, agent, playbook)


def living_jobs(work: WorkDir) -> List[RunningJob]:
    found = [_living(marker) for marker in _markers(work)]
    return [job for job in found if job is not None]


def clear_orphans(work: WorkDir) -> None:
    """Ends every job whose agent is gone, so that the devices are free and nothing writes any more.

    To be called by the holder of the lock.
    """
    for marker in _markers(work):
        if _living(marker) is not None:
            continue
        folder = marker.parent
        verb = (read_json(marker) or {}).get("verb")
        Mark.of_job(work.root, folder.name).kill()
        work.record("orphan_cleared", job=folder.name, verb=verb)
        if folder.parent == work.scratch:
            remove_tree(folder)
        else:
            marker.unlink(missing_ok=True)
    for folder in work.scratch.glob("*"):
        # killed before the marker was there, or after it had been taken away: no job is left
        if not (folder / MARKER).exists() and not Path("/proc", folder.name.rpartition("-")[2]).exists():
            remove_tree(folder)
    _forget_secrets(work)


def _forget_secrets(work: WorkDir) -> None:
    """A launch that was killed half-way leaves the secrets that its supervisor was to take."""
    for file in work.runs.glob("*/secrets.json"):
        state = read_json(file.with_name("state.json")) or {}
        keeper = ProcessId.from_json(state.get("supervisor"))
        # the launch was killed, but not before it had started the supervisor
        comes = process_with(["supervise", str(file.parent)]) is not None
        if not comes and (state.get("boot_id") != boot_id() or keeper is None or not keeper.alive):
            file.unlink(missing_ok=True)
