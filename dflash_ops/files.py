"""Files of ours are whole or absent: temporary name, fsync, rename."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

FULL = (errno.ENOSPC, errno.EDQUOT)


class NoRoom(OSError):  # noqa: N818
    """A full disk, at `filename`. `needed`: bytes that were to be written there."""

    needed: int | None = None


@contextmanager
def writing(path: Path, needed: int | None = None) -> Iterator[None]:
    """What cannot be written inside the block is an OSError that names `path`; NoRoom on a full disk."""
    try:
        yield
    except NoRoom:
        raise
    except OSError as error:
        if error.errno in FULL:
            full = NoRoom(error.errno, error.strerror, str(path))
            full.needed = needed
            raise full from error
        if error.filename is None:
            error.filename = str(path)
        raise


def write_bytes(path: Path, data: bytes) -> None:
    """Mode 0600 for what is new; the folder must exist. Raises OSError that names `path`.

    What a killed command left half-written beside it goes.
    """
    with writing(path, len(data)):
        _write_bytes(path, data)
    _sweep(path)


def _write_bytes(path: Path, data: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def _sweep(path: Path) -> None:
    left = re.compile(rf"\.{re.escape(path.name)}\.(\d+)\.tmp")
    with suppress(OSError):
        for other in path.parent.iterdir():
            writer = left.fullmatch(other.name)
            if writer is not None and not _lives(int(writer[1])):
                other.unlink(missing_ok=True)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


def write_json(path: Path, value: object) -> None:
    write_bytes(path, (json.dumps(value, indent=2, sort_keys=True) + "\n").encode())


def sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
