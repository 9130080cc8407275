"""Files that are whole or absent, digests, and paths that stay where they belong."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import io
import json
import os
import shutil
import stat
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Dict, Iterator, List, Optional

CHUNK = 1024 * 1024


def canonical_json(value: Any) -> bytes:
    """The one spelling of a JSON value that digests are taken of."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def digest_of(value: Any) -> str:
    """sha256 (hex) of a JSON value in its canonical spelling."""
    return hashlib.sha256(canonical_json(value)).hexdigest()


def sha256_file(path: Path) -> str:
    with path.open("rb") as file:
        return sha256_stream(file)


def sha256_stream(file: BinaryIO, size: Optional[int] = None) -> str:
    """sha256 (hex) of the next `size` bytes, or of everything up to the end."""
    digest = hashlib.sha256()
    left = size
    while left is None or left > 0:
        block = file.read(CHUNK if left is None else min(CHUNK, left))
        if not block:
            break
        digest.update(block)
        left = None if left is None else left - len(block)
    return digest.hexdigest()


def fsync_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def temporary(path: Path) -> Path:
    """Where a new `path` is written first; the pid tells whether its writer still lives (leftovers.py)."""
    return path.with_name(f".{path.name}.{os.getpid()}-{os.urandom(4).hex()}.tmp")


def atomic_write(path: Path, data: bytes, *, mode: int = 0o600, durable: bool = True) -> None:
    """Writes beside `path`, fsyncs (unless not durable) and renames: readers see the old file or the new one."""
    part = temporary(path)
    try:
        with part.open("xb") as file:
            os.fchmod(file.fileno(), mode)
            file.write(data)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise
    if durable:
        fsync_folder(path.parent)


def write_json(path: Path, value: Any, *, mode: int = 0o600, durable: bool = True) -> None:
    atomic_write(path, json.dumps(value, indent=1).encode() + b"\n", mode=mode, durable=durable)


def read_json(path: Path) -> Optional[Dict[str, Any]]:
    """The JSON object in a regular file; None when there is no such file or no whole object in it."""
    try:
        with open_regular(path) as file:
            value = json.loads(file.read().decode())
    except (OSError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def open_regular(path: Path) -> io.BufferedReader:
    """Opens a regular file for reading, never through a link at its last part and never a device or pipe."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(f"{path} is not a regular file")
    return os.fdopen(fd, "rb")


def append_line(path: Path, value: Any) -> None:
    """Appends one JSON line in a single write, so that lines of several processes never mix."""
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(fd, canonical_json(value) + b"\n")
    finally:
        os.close(fd)


def is_safe_relative(path: str) -> bool:
    """Whether `path` is plain and relative: no empty part, no `.` or `..`, no leading slash, no NUL."""
    return (
        bool(path)
        and "\0" not in path
        and not path.startswith("/")
        and str(PurePosixPath(path)) == path
        and (".." not in path.split("/") and path != ".")
    )


def remove_tree(path: Path) -> None:
    """Removes a tree, a read-only one too; it need not exist."""
    if path.is_symlink() or path.is_file():
        path.unlink()
        return
    if not path.exists():
        return
    for folder, _, _ in os.walk(path):
        os.chmod(folder, 0o700)
    shutil.rmtree(path)


def tail_lines(path: Path, count: int = 40, *, limit: int = 64 * 1024) -> List[str]:
    """The last lines of a text file, at most `limit` bytes of it; empty when there is none."""
    try:
        with open_regular(path) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - limit))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return []
    return text.splitlines()[-count:]


@contextlib.contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Holds the kernel's lock on `path` for a moment, against other agents on this host."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        if error.errno != errno.EROFS:
            raise
        # a disk that went read-only: nobody else can change anything there either
        yield
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
