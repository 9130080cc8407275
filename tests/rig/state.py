"""A rig's folder: made, told apart from one whose owner died, and removed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
PREFIX = "dflash-rig-"


class State:
    """The folder of one rig, locked for as long as its owner lives."""

    def __init__(self, parent: Path) -> None:
        parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        with _locked(parent / "lock"):
            _remove_stale(parent)
            self.folder = parent / f"{PREFIX}{os.getpid()}"
            self.folder.mkdir(mode=0o755)
            self._lock = os.open(self.folder / "alive", os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX)

    def remove(self) -> None:
        os.close(self._lock)
        # Under the lock, so that nobody takes the folder for a stale one and removes it as well.
        with _locked(self.folder.with_name("lock")):
            if self.folder.exists():
                _remove(self.folder)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _remove_stale(parent: Path) -> None:
    """Remove what runs that were killed have left: their processes and mounts went with their node."""
    for folder in parent.glob(f"{PREFIX}*"):
        lock = os.open(folder / "alive", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        else:
            _remove(folder)
        finally:
            os.close(lock)


def _remove(folder: Path) -> None:
    _remove_cgroups(folder.name)
    shutil.rmtree(folder)


def _remove_cgroups(name: str) -> None:
    """LXC's monitor removes its cgroups, unless it was killed."""
    for top in (path for path in CGROUPS.rglob(f"lxc.*.{name}-*") if path.is_dir()):
        for root, _, _ in os.walk(top, topdown=False):
            _rmdir(Path(root))


def _rmdir(cgroup: Path) -> None:
    # EBUSY until the kernel has finished with the last process in it.
    for _ in range(50):
        try:
            cgroup.rmdir()
        except FileNotFoundError:
            return
        except OSError:
            time.sleep(0.02)
        else:
            return
