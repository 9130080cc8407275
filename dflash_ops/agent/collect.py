"""What a run has to bring home, and the bytes of it."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any, Dict, Iterator, Optional

from .arguments import Arguments
from .conversation import Conversation
from .errors import AgentError, ExitCode
from .files import CHUNK, is_safe_relative, open_regular, read_json, sha256_file, sha256_stream
from .runs import RunFolder, find_run

_RECORDS = ("run.json", "settings.json", "verdict.json", "exit.json")
_UNFINISHED = (".part", ".tmp")
_MANIFEST = "manifest.json"


def op_files(conversation: Conversation, args: Arguments) -> Dict[str, Any]:
    folder = find_run(conversation.work, args.optional_run())
    return {"files": [*_records(folder), *_checkpoints(folder)]}


def _records(folder: RunFolder) -> Iterator[Dict[str, Any]]:
    """Records, log and the files at the top of the contract's DIR."""
    paths = [folder.path / name for name in _RECORDS]
    paths += sorted((folder.path / "log").glob("*.log"))
    paths += sorted(path for path in folder.out.iterdir() if not path.name.startswith("."))
    for path in paths:
        if path.suffix not in _UNFINISHED and _regular_size(path) is not None:
            item = _described(folder, path)
            if item is not None:
                yield item


def _described(folder: RunFolder, path: Path, sha256: Optional[str] = None) -> Optional[Dict[str, Any]]:
    """Path, size and sha256; None when the file went away meanwhile (the trainer keeps its last checkpoints only)."""
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            digest = sha256 or sha256_stream(file, size)
    except OSError:
        return None
    return {"path": str(path.relative_to(folder.path)), "size": size, "sha256": digest}


def _checkpoints(folder: RunFolder) -> Iterator[Dict[str, Any]]:
    """Every complete checkpoint: its listed files, then its manifest. The hashes are the manifest's own."""
    for checkpoint in sorted((folder.out / "checkpoints").glob("*")):
        if checkpoint.suffix in _UNFINISHED or checkpoint.is_symlink():
            continue
        listed = _listed_files(checkpoint)
        if listed is None:
            continue
        for path, sha256 in listed.items():
            item = _described(folder, path, sha256)
            if item is None:
                break
            yield item
        else:
            yield {
                "path": str((checkpoint / _MANIFEST).relative_to(folder.path)),
                "size": (checkpoint / _MANIFEST).stat().st_size,
                "sha256": sha256_file(checkpoint / _MANIFEST),
            }


def _listed_files(checkpoint: Path) -> Optional[Dict[Path, str]]:
    """The files of a complete checkpoint; None when its manifest or a file of the listed size is not there."""
    manifest = read_json(checkpoint / _MANIFEST)
    if manifest is None or not isinstance(manifest.get("files"), list):
        return None
    found = {}
    for item in manifest["files"]:
        path, size, sha256 = (item.get(key) for key in ("path", "size", "sha256"))
        if not isinstance(path, str) or not is_safe_relative(path) or not isinstance(sha256, str):
            return None
        if _regular_size(checkpoint / path) != size or Path(path).suffix in _UNFINISHED:
            return None
        found[checkpoint / path] = sha256
    return found


def _regular_size(path: Path) -> Optional[int]:
    try:
        status = path.lstat()
    except OSError:
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def op_read(conversation: Conversation, args: Arguments) -> Dict[str, Any]:
    """The file from `offset` to the end that it has now; size and sha256 are those of the whole file up to there."""
    folder = find_run(conversation.work, args.optional_run())
    relative, offset = args.text("path"), args.size("offset", 0)
    path = folder.path / relative
    inside = is_safe_relative(relative) and path.resolve() == folder.path.resolve() / relative
    if not inside or path.suffix in _UNFINISHED or ".part" in [Path(part).suffix for part in path.parts]:
        raise _unreadable(relative, "it is not a finished file of the run")
    try:
        file = open_regular(path)
    except OSError as error:
        raise _unreadable(relative, error.strerror or str(error)) from error
    with file:
        size = os.fstat(file.fileno()).st_size
        if offset > size:
            raise _unreadable(relative, f"it has {size} bytes, fewer than the offset {offset}")
        file.seek(offset)
        left = size - offset
        while left > 0:
            block = file.read(min(CHUNK, left))
            if not block:
                raise _unreadable(relative, "it was cut off while it was read")
            left -= len(block)
            conversation.data(block)
        file.seek(0)
        return {"size": size, "sha256": sha256_stream(file, size)}


def _unreadable(path: str, why: str) -> AgentError:
    return AgentError(
        "file", f"{path!r} cannot be read: {why}", "files of the run", "ask for the list of files again", ExitCode.USAGE
    )
