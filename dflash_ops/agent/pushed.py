"""An archive that is put here in pieces beside the conversation (`pct push`), and goes on where it broke off.

What puts them here may put a part, or nothing, and tells of neither: a piece counts once it is what was announced.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Tuple

from .disk import free_bytes
from .errors import AgentError, ExitCode
from .files import CHUNK, sha256_stream
from .uploads import check_space, disk_full, open_alone


@dataclass(frozen=True)
class Piece:
    """What was announced: `size` bytes in the file `path`, from byte `start` of the whole."""

    path: Path
    start: int
    size: int
    sha256: str


def begin_pieces(path: Path, size: int) -> Tuple[int, str]:
    """How many bytes of an archive of `size` have come to `path`, and their sha256 (hex), which the client compares.

    AgentError `disk_full` where the rest does not fit.
    """
    with open_alone(path) as file:
        if file.seek(0, os.SEEK_END) > size:
            file.truncate(0)
        file.seek(0)
        sha256 = sha256_stream(file)
        there = file.tell()
    check_space(path.parent, size - there)
    return there, sha256


def append_piece(path: Path, piece: Piece) -> int:
    """Adds a piece to what has come to `path`, and removes its file; returns how many bytes are there now.

    AgentError `archive` (exit 4) or `disk_full` where it is not what was announced; what was there before stays.
    """
    try:
        with open_alone(path) as file, open(piece.path, "rb", opener=_no_link) as source:
            if file.seek(0, os.SEEK_END) < piece.start:
                raise _not_whole(f"{path} ends before byte {piece.start}, where the piece begins")
            file.truncate(piece.start)
            file.seek(piece.start)
            try:
                _copy(piece, source, file)
            except BaseException:
                with contextlib.suppress(OSError):
                    file.truncate(piece.start)
                raise
            return file.tell()
    except FileNotFoundError:
        raise _not_whole(f"there is no file {piece.path}") from None
    finally:
        piece.path.unlink(missing_ok=True)


def _copy(piece: Piece, source: BinaryIO, file: BinaryIO) -> None:
    """Hashes the very bytes that it writes: a push that comes too late may write to the piece meanwhile."""
    digest, size = hashlib.sha256(), 0
    while stat.S_ISREG(os.fstat(source.fileno()).st_mode) and (block := source.read(CHUNK)):
        size += len(block)
        if size > piece.size:
            break
        file.write(block)
        digest.update(block)
    # so that they are there for the next command if this one is gone now
    file.flush()
    if size < piece.size and free_bytes(piece.path.parent) < piece.size - size:
        raise disk_full(piece.path.parent, piece.size)
    if size != piece.size or digest.hexdigest() != piece.sha256:
        raise _not_whole(f"{piece.path} did not arrive whole ({size} bytes)")


def _no_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


def _not_whole(what: str) -> AgentError:
    return AgentError("archive", what, "release to stage", "run the command again", ExitCode.TRANSPORT)
