"""Brings a run's files home: verified by sha256, resumed where they broke off, whole or absent at their final name."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from dflash_ops.deploy.events import Events
from dflash_ops.errors import TransportError
from dflash_ops.files import sync_folder
from dflash_ops.transport import Conversation

CHECKPOINTS = "checkpoints"
CONTRACT_FILES = ("metrics.ndjson", "result.json")


@dataclass(frozen=True)
class Collected:
    files: int
    """How many were brought now; those already here and equal are not counted."""
    bytes: int
    checkpoints: tuple[str, ...]


@dataclass(frozen=True)
class RemoteFile:
    path: PurePosixPath
    size: int
    sha256: str
    fixed: bool
    """False for what still grows (log, metrics): then the digest told with the bytes counts."""

    @property
    def checkpoint(self) -> str | None:
        """`step-000080` for a file of a checkpoint."""
        parts = self.path.parts
        return parts[parts.index(CHECKPOINTS) + 1] if CHECKPOINTS in parts[:-2] else None

    @property
    def home(self) -> PurePosixPath:
        """Where it lies in `runs/<run>/`: the contract's files at the top, anything else of the trainer's in `out/`.

        So that nothing which a trainer writes can take the place of a record.
        """
        parts = self.path.parts
        return PurePosixPath(*parts[1:]) if parts[0] == "out" and parts[1] in CONTRACT_FILES else self.path


def collect(conversation: Conversation, run: str, folder: Path, events: Events) -> Collected:
    """Everything of `run` that is complete on the host. Safe to call again, while the run goes on as well."""
    listing = [_remote(entry) for entry in conversation.request("files", {"run": run})["files"]]
    brought = size = 0
    for one in (file for file in listing if file.checkpoint is None):
        target = _inside(folder, one.home)
        if not _same(target, one):
            size += _bring(conversation, run, one, target)
            brought += 1
    names = sorted({file.checkpoint for file in listing if file.checkpoint is not None})
    for name in names:
        files = [file for file in listing if file.checkpoint == name]
        count, bytes_ = _bring_checkpoint(conversation, run, name, files, folder)
        brought, size = brought + count, size + bytes_
        if count:
            events.emit("checkpoint", run=run, path=str(folder / CHECKPOINTS / name), bytes=bytes_)
    return Collected(brought, size, tuple(names))


def _remote(entry: dict[str, Any]) -> RemoteFile:
    path = PurePosixPath(entry["path"])
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise TransportError(f"the host names a file outside the run: {entry['path']!r}", kind="protocol")
    grows = path.parts[0] == "log" or path.name == "metrics.ndjson"
    return RemoteFile(path, int(entry["size"]), str(entry["sha256"]), fixed=not grows)


def _inside(folder: Path, path: PurePosixPath) -> Path:
    target = folder.joinpath(*path.parts)
    target.parent.mkdir(parents=True, exist_ok=True)
    return target


def _same(target: Path, file: RemoteFile) -> bool:
    return target.is_file() and target.stat().st_size == file.size and sha256_of(target) == file.sha256


def _bring_checkpoint(
    conversation: Conversation, run: str, name: str, files: Iterable[RemoteFile], folder: Path
) -> tuple[int, int]:
    final = folder / CHECKPOINTS / name
    files = list(files)
    relative = {file: PurePosixPath(*file.path.parts[file.path.parts.index(name) + 1 :]) for file in files}
    if final.is_dir() and all(_same(final.joinpath(*relative[file].parts), file) for file in files):
        return 0, 0
    part = final.with_name(f"{name}.part")
    size = 0
    for file in files:
        target = _inside(part, relative[file])
        if not _same(target, file):
            size += _bring(conversation, run, file, target)
    sync_folder(part)
    if final.exists():
        # it was damaged here: what came just now is verified, so it takes the place
        _set_aside(final)
    part.rename(final)
    sync_folder(final.parent)
    return len(files), size


def _set_aside(folder: Path) -> None:
    number = 1
    while (aside := folder.with_name(f"{folder.name}.damaged-{number}")).exists():
        number += 1
    folder.rename(aside)


def _bring(conversation: Conversation, run: str, file: RemoteFile, target: Path) -> int:
    """Returns the bytes that crossed the wire. What was brought before is kept and continued."""
    part = target.with_name(f"{target.name}.part")
    start = part.stat().st_size if part.exists() else 0
    if start > file.size:
        part.unlink()
        start = 0
    with part.open("ab") as handle:
        result = conversation.request(
            "read",
            {"run": run, "path": str(file.path), "offset": start},
            on_data=lambda stream, data: _write(handle, data),
        )
        handle.flush()
        os.fsync(handle.fileno())
    expected = file.sha256 if file.fixed else str(result["sha256"])
    size = part.stat().st_size
    if sha256_of(part) != expected:
        part.unlink()
        raise TransportError(
            f"{file.path} arrived damaged and was thrown away",
            kind="verify",
            lost=True,
            fix="run the same command again",
        )
    part.replace(target)
    sync_folder(target.parent)
    return size - start


def _write(handle: Any, data: bytes) -> None:
    handle.write(data)


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as handle:
        while chunk := handle.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
