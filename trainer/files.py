"""Files that are whole or absent: temporary name, fsync, rename, fsync of the folder."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

_MIB = 1 << 20


def fsync_dir(path: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_file(path: Path) -> None:
    """Make a file's content durable."""
    with path.open("rb") as stream:
        os.fsync(stream.fileno())


def write_json(path: Path, value: object) -> None:
    """Write `value` to `path` atomically. NaN and infinity are refused (they are not JSON)."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, indent=1) + "\n"
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    with temporary.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.rename(path)
    fsync_dir(path.parent)


def sha256_file(path: Path) -> str:
    """Hex digest of a whole file."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(_MIB):
            digest.update(chunk)
    return digest.hexdigest()


def fingerprint_file(path: Path) -> str:
    """Hex digest over a file's size and its first and last MiB: for weights too large to read in a check."""
    size = path.stat().st_size
    digest = hashlib.sha256(f"{size}\n".encode())
    with path.open("rb") as stream:
        digest.update(stream.read(_MIB))
        stream.seek(max(0, size - _MIB))
        digest.update(stream.read(_MIB))
    return digest.hexdigest()


@contextlib.contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Hold an exclusive lock between processes; the kernel drops it when the process dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield
