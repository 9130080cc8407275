"""What stays on the workstation of a run: `runs/<run>/`."""

from __future__ import annotations

import fcntl
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from dflash_ops.agent.arguments import RUN_NAME
from dflash_ops.errors import ExitCode, OpsError, TransportError
from dflash_ops.files import write_json


def new_run_id(playbook: str) -> str:
    """Sorts by start time, names its playbook, and is unique: `20261129-151233-quickstart-7f3a`."""
    return f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{playbook}-{secrets.token_hex(2)}"


def create_record(runs: Path, run: str, facts: Mapping[str, object]) -> Path:
    """Makes `runs/<run>/` with `record.json`; the folder is private to its owner."""
    folder = _folder(runs, run)
    folder.mkdir(parents=True, mode=0o700, exist_ok=True)
    write_json(folder / "record.json", {"v": 1, "run": run, **facts})
    return folder


def _folder(runs: Path, run: str) -> Path:
    """A run's name may come from a host: it may name a folder in `runs`, and nothing else."""
    if not isinstance(run, str) or not RUN_NAME.fullmatch(run):
        raise TransportError(f"the host calls a run {run!r:.120}, which is no name", kind="protocol")
    return runs / run


def open_record(runs: Path, run: str, facts: Mapping[str, object]) -> Path:
    """The run's folder, made where this workstation has none (a run that was launched elsewhere)."""
    folder = _folder(runs, run)
    return folder if (folder / "record.json").exists() else create_record(runs, run, facts)


def record_of(runs: Path, status: Mapping[str, object], host: str) -> Path:
    """The folder of a run that was begun elsewhere, or by the host itself: as its status tells of it."""
    told = ("playbook", "release", "skipped_canary", "parent")
    return open_record(runs, str(status["run"]), {"host": host, **{name: status[name] for name in told}})


@contextmanager
def bringing_home(folder: Path, *, wait: Callable[[str], None] | None = None) -> Iterator[None]:
    """One command at a time brings files into a run's folder. The kernel lets go of it when that command is gone.

    Raises OpsError (exit 9) that names the other one; with `wait`, which is told instead, waits for its end.
    """
    handle = os.open(folder / ".collecting", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            other = f"process {os.read(handle, 100).decode(errors='replace') or '?'}"
            if wait is None:
                raise OpsError(
                    f"{other} on this workstation brings this run home already",
                    exit_code=ExitCode.LOCKED,
                    kind="collecting",
                    where=str(folder),
                    fix="let it go on, or end it and run the same command again: what is here is kept",
                ) from None
            wait(f"{other} brings this run home already: waiting for its end")
            fcntl.flock(handle, fcntl.LOCK_EX)
        os.ftruncate(handle, 0)
        os.pwrite(handle, str(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(handle)
