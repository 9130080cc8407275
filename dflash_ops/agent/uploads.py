"""A file that comes over the wire, and goes on where it broke off."""

from __future__ import annotations

import contextlib
import fcntl
import os
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Iterator, Optional

from .conversation import Conversation
from .disk import free_bytes
from .errors import AgentError, ExitCode
from .files import sha256_stream


@dataclass(frozen=True)
class Archive:
    """What the client announced: `size` in bytes; without `sha256` (hex) an upload always begins at its first byte."""

    size: int
    sha256: Optional[str] = None


def upload_archive(conversation: Conversation, path: Path, wanted: Archive) -> int:
    """Brings `path` to what is wanted, after the bytes that are there already; returns how many came now.

    The beginning is not trusted: where the whole is not what was announced, all of it is asked for once more.
    """
    with open_alone(path) as file:
        there = file.seek(0, os.SEEK_END)
        start = there if wanted.sha256 is not None and there <= wanted.size else 0
        came = _take(conversation, file, start, wanted.size)
        if not _is(file, wanted) and start > 0:
            came += _take(conversation, file, 0, wanted.size)
        if not _is(file, wanted):
            raise AgentError(
                "archive", "the archive arrived damaged", str(path), "run the command again", ExitCode.TRANSPORT
            )
    return came


def _take(conversation: Conversation, file: BinaryIO, start: int, size: int) -> int:
    check_space(Path(file.name).parent, size - start)
    file.truncate(start)
    file.seek(start)
    conversation.event("need", **{"from": start, "bytes": size - start})
    for block in conversation.upload(size - start):
        file.write(block)
        # so that they are there for the next upload if the client is gone now
        file.flush()
    return size - start


def _is(file: BinaryIO, wanted: Archive) -> bool:
    file.seek(0)
    return wanted.sha256 is None or sha256_stream(file) == wanted.sha256


@contextlib.contextmanager
def open_alone(path: Path) -> Iterator[BinaryIO]:
    """For reading and writing; a file that a frozen agent still holds open is left to it, without its name."""
    while True:
        with open(path, "r+b", opener=_make_or_open) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                path.unlink()
                continue
            yield file
            return


def _make_or_open(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW, 0o600)


def check_space(folder: Path, needed: int) -> None:
    """AgentError `disk_full` where `needed` bytes do not fit."""
    if free_bytes(folder) < needed:
        raise disk_full(folder, needed)


def disk_full(folder: Path, needed: int) -> AgentError:
    return AgentError(
        "disk_full",
        f"no space for what is sent: {free_bytes(folder)} bytes free, {needed} needed",
        str(folder),
        "make room there, or choose another work directory",
        ExitCode.BLOCKED,
    )
