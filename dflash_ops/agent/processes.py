"""Processes by what does not lie: pid with start time, boot id, and a mark in the environment."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional

_PR_SET_CHILD_SUBREAPER = 36
_DEAD_STATES = ("Z", "X")


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def boottime_s() -> float:
    """Seconds since boot, sleep included: it cannot be set back."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _stat_fields(pid: int) -> Optional[List[str]]:
    """Fields of /proc/PID/stat from field 3 (state) on; the name before may hold spaces and brackets."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    return text.rpartition(")")[2].split()


def start_time(pid: int) -> Optional[int]:
    """Field 22 of /proc/PID/stat (clock ticks after boot); None when the process is gone or a zombie."""
    fields = _stat_fields(pid)
    if fields is None or fields[0] in _DEAD_STATES:
        return None
    return int(fields[19])


@dataclass(frozen=True)
class ProcessId:
    """A process that cannot be mistaken for a later one with the same pid (within one boot)."""

    pid: int
    start: int

    @classmethod
    def of(cls, pid: int) -> "Optional[ProcessId]":
        start = start_time(pid)
        return None if start is None else cls(pid, start)

    @classmethod
    def from_json(cls, value: Any) -> "Optional[ProcessId]":
        if not isinstance(value, dict):
            return None
        pid, start = value.get("pid"), value.get("start", -1)
        return cls(pid, start) if isinstance(pid, int) and isinstance(start, int) else None

    def to_json(self) -> Dict[str, int]:
        return {"pid": self.pid, "start": self.start}

    @property
    def alive(self) -> bool:
        return start_time(self.pid) == self.start

    def send(self, number: int) -> None:
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


def pids() -> List[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def process_with(words: List[str]) -> Optional[ProcessId]:
    """A living process whose command line has these words one after the other."""
    wanted = b"\0" + b"\0".join(os.fsencode(word) for word in words) + b"\0"
    # twice: one that forks and ends is missed between the list and the look
    for pid in [*pids(), *pids()]:
        try:
            found = wanted in b"\0" + Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        process = ProcessId.of(pid) if found else None
        if process is not None:
            return process
    return None


@dataclass(frozen=True)
class Mark:
    """What all processes of one run, or of one job of a conversation, carry in their environment.

    Only `root`, the work directory, makes a name unique on a host that has several.
    """

    name: str
    value: str
    root: Path

    @classmethod
    def of_run(cls, root: Path, run: str) -> "Mark":
        return cls("DFLASH_OPS_RUN", run, root)

    @classmethod
    def of_job(cls, root: Path, job: str) -> "Mark":
        return cls("DFLASH_OPS_JOB", job, root)

    def environment(self) -> Dict[str, str]:
        return {self.name: self.value, "DFLASH_OPS_WORKDIR": str(self.root)}

    def pids(self) -> List[int]:
        """Living processes that were started with this mark; only those that we may look into."""
        wanted = {f"{name}={value}".encode() for name, value in self.environment().items()}
        found = []
        for pid in pids():
            try:
                environment = Path(f"/proc/{pid}/environ").read_bytes()
            except OSError:
                continue
            if wanted.issubset(environment.split(b"\0")) and start_time(pid) is not None:
                found.append(pid)
        return found

    def kill(self, *, patience_s: float = 5.0) -> List[int]:
        """Kills them until none is left; the pids that would not die in time."""
        until = time.monotonic() + patience_s
        while True:
            pids = [pid for pid in self.pids() if pid != os.getpid()]
            if not pids or time.monotonic() > until:
                return pids
            for pid in pids:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)


def living_runs(root: Path) -> Dict[str, List[int]]:
    """Every run of the work directory `root` that has living processes, with their pids: one look at /proc for all."""
    runs: Dict[str, List[int]] = {}
    place = f"DFLASH_OPS_WORKDIR={root}".encode()
    for pid in pids():
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if place in environment and start_time(pid) is not None:
            for item in environment:
                if item.startswith(b"DFLASH_OPS_RUN="):
                    runs.setdefault(item.partition(b"=")[2].decode("utf-8", "replace"), []).append(pid)
    return runs


def children_of(parent: int) -> List[int]:
    """Pids whose parent is `parent`, zombies left out."""
    found = []
    for pid in pids():
        fields = _stat_fields(pid)
        if fields is not None and fields[0] not in _DEAD_STATES and int(fields[1]) == parent:
            found.append(pid)
    return found


@contextlib.contextmanager
def until_ended(pid: int) -> Iterator[Callable[[float], None]]:
    """A pause of so many seconds that is over at once when `pid`, a child that nobody has waited for, ends.

    Where the kernel cannot tell (or a container may not ask) it is a plain one.
    """
    try:
        ending = os.pidfd_open(pid)
    except (OSError, AttributeError):
        yield time.sleep
        return

    def pause(seconds: float) -> None:
        select.select([ending], [], [], seconds)

    try:
        yield pause
    finally:
        os.close(ending)


def signal_group(pid: int, number: int) -> None:
    """Signals the process group that `pid` leads; a group that is gone is no error."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def become_subreaper() -> None:
    """Orphans below this process become its children, so that it can find and reap them (prctl(2))."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl(PR_SET_CHILD_SUBREAPER): {os.strerror(number)}")
