"""Folders of a command's own that go away with it: when it ends, or, where it was killed, with the next command."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PREFIX = "dflash-ops-scratch-"
OWNER = "owner"
"""The file in each that its command keeps locked: the kernel frees it however that command ends."""


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """An empty folder, for the length of the block. What killed commands of this user left behind is swept first.

    Raises OSError.
    """
    sweep()
    outer, owner = _owned()
    try:
        inner = outer / "content"
        inner.mkdir()
        yield inner
    finally:
        shutil.rmtree(outer, ignore_errors=True)
        os.close(owner)


def sweep() -> None:
    """Removes the folders whose owner is dead, known by its lock; what cannot be removed stays."""
    with contextlib.suppress(OSError):
        found = [Path(entry.path) for entry in os.scandir(tempfile.gettempdir()) if entry.name.startswith(PREFIX)]
        for folder in found:
            with contextlib.suppress(OSError):
                _sweep(folder)


def _sweep(folder: Path) -> None:
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        return
    owner = _open_owner(folder)
    try:
        fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(owner)


def _owned() -> tuple[Path, int]:
    """A new folder and its locked file. A sweep that comes between the two takes the folder: then another is made."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX))
        try:
            owner = _open_owner(folder)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(owner, fcntl.LOCK_EX)
        except OSError as error:
            # a file system without locks, on which nothing can be swept either
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL):
                os.close(owner)
                raise
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(owner), (folder / OWNER).lstat()):
                return folder, owner
        os.close(owner)


def _open_owner(folder: Path) -> int:
    return os.open(folder / OWNER, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
