"""Which device is held, and by whom: a run, or the tune, canary or prepare of a living agent.

A lease is no file of its own. It is the record that its owner cannot be without (run.json, running.json), written under
the guard, together with what proves that the owner lives: so it cannot outlive its owner, and nothing has to expire.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Sequence

from .errors import AgentError, ExitCode
from .files import exclusive
from .orphans import MARKER, living_jobs, mark_running
from .processes import living_runs
from .runs import RunFolder, RunState, all_runs
from .workdir import WorkDir


@dataclass(frozen=True)
class Lease:
    """`devices` is None where the owner's record is damaged: then it may use any.

    `kind` is `run` or the verb of a job; `state` is a run's, RUNNING for a job; `pids` are what is left of a run that
    is not running, none where it waits to be started again; `agent` is the pid of a job's agent; `since` is Unix time.
    """

    kind: str
    owner: str
    devices: Optional[List[str]]
    since: Optional[float]
    state: str
    pids: List[int]
    agent: Optional[int]
    playbook: Optional[str]

    def shared(self, devices: Sequence[str]) -> List[str]:
        """Those of `devices` that this lease keeps from others."""
        return sorted(set(devices) if self.devices is None else set(devices) & set(self.devices))

    def to_json(self) -> Dict[str, Any]:
        return asdict(self)

    @property
    def how(self) -> str:
        if self.state == RunState.RUNNING.value:
            return "is running"
        if self.state == RunState.LOST.value:
            return f"has lost its supervisor, but its processes {self.pids} live"
        if not self.pids:
            return f"has ended {self.state} and is about to be started again"
        return f"has ended {self.state}, but its processes {self.pids} live"


def leases(work: WorkDir) -> List[Lease]:
    """Every lease that holds now, those of this very agent left out."""
    return [*_of_runs(work), *_of_jobs(work)]


def _of_runs(work: WorkDir) -> Iterator[Lease]:
    living = living_runs(work.root)
    for folder in all_runs(work):
        state = folder.state()
        left = [] if state is RunState.RUNNING else living.get(folder.run, [])
        if left:
            # they were seen before its state was read: what ended in between holds nothing
            left = folder.mark.pids()
        if state is RunState.RUNNING or left or folder.starts_again:
            yield _of_run(folder, state, left)


def _of_run(folder: RunFolder, state: RunState, left: List[int]) -> Lease:
    playbook = folder.record().get("playbook")
    return Lease("run", folder.run, folder.devices(), folder.begun(), state.value, left, None, playbook)


def _of_jobs(work: WorkDir) -> Iterator[Lease]:
    for job in living_jobs(work):
        if job.devices and job.agent.pid != os.getpid():
            state = RunState.RUNNING.value
            yield Lease(job.verb, job.name, job.devices, job.since, state, [], job.agent.pid, job.playbook)


def refuse_if_busy(work: WorkDir, devices: Sequence[str], *, but: Optional[str] = None) -> None:
    """AgentError `busy` when one of the devices is leased; a lost run whose processes live on still holds its own.

    `but` names the run whose restart asks: what it keeps for that is not in its way.
    """
    for lease in leases(work):
        shared = lease.shared(devices)
        kept_for_it = lease.kind == "run" and lease.owner == but and not lease.pids
        if not shared or kept_for_it:
            continue
        if lease.kind == "run":
            fix = f"wait for it, stop it (dflash-ops stop {lease.owner}), or choose other GPUs"
        else:
            fix = "wait until it is done, or see who waits for it: dflash-ops unlock"
        raise AgentError(
            "busy",
            f"{lease.kind} {lease.owner} {lease.how} on {', '.join(shared)}",
            "devices of the host",
            fix,
            ExitCode.RUN_FAILED,
            lease.to_json(),
        )


@contextlib.contextmanager
def leased(work: WorkDir, folder: Path, verb: str, devices: List[str], playbook: Optional[str]) -> Iterator[None]:
    """Makes `folder` for a job to which the devices belong while the block runs; AgentError `busy`.

    The mark stays when the agent is killed in the block: by it the next agent finds what is left of the job.
    """
    with exclusive(work.guard):
        refuse_if_busy(work, devices)
        folder.mkdir(mode=0o700, parents=True)
        mark_running(folder, verb, devices, playbook)
    try:
        yield
    finally:
        (folder / MARKER).unlink(missing_ok=True)
