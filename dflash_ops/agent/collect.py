"""What a run has to bring home, and the bytes of it."""

from __future__ import annotations

import hashlib
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional

from .arguments import Arguments
from .conversation import Conversation
from .errors import AgentError, ExitCode
from .files import is_safe_relative, open_regular, read_json, sha256_file, sha256_stream
from .notify import FILE as NOTIFY
from .runs import RunFolder, RunState, find_run

_RECORDS = ("run.json", "settings.json", "verdict.json", "exit.json")
UNFINISHED = (".part", ".tmp")
_MANIFEST = "manifest.json"
_TENSORBOARD = "tensorboard"
_EVENT_FILES = "events.out.tfevents.*"
_BLOCK = 256 * 1024
"""Bytes that are read and sent at a time: they stay in a core's own cache."""


def op_files(conversation: Conversation, args: Arguments) -> Dict[str, Any]:
    folder = find_run(conversation.work, args.optional_run())
    # asked first: what is listed after the end of a run is all that there will be
    state = folder.state()
    listed = [*_records(folder, state)]
    for checkpoint in checkpoints(folder):
        listed += _files_of(folder, checkpoint)
    return {"state": state.value, "files": listed}


def _records(folder: RunFolder, state: RunState) -> Iterator[Dict[str, Any]]:
    """Records, log, the files at the top of the contract's DIR, and TensorBoard's below it.

    What still grows has no hash while the run goes on: it would be another one a moment later.
    """
    log = sorted((folder.path / "log").glob("*.log"))
    events = _event_files(folder)
    growing = [*(path for path in log if path.stem.isdigit()), folder.metrics, *events]
    paths = [*(folder.path / name for name in _RECORDS), *log]
    paths += sorted(path for path in folder.out.iterdir() if not path.name.startswith("."))
    for path in [*paths, *events]:
        if path.suffix in UNFINISHED:
            continue
        grows = path in growing
        try:
            with open_regular(path) as file:
                size = os.fstat(file.fileno()).st_size
                hashed = None if grows and state is RunState.RUNNING else sha256_stream(file, size)
        except OSError:
            # not there, no regular file, or gone meanwhile
            continue
        yield _item(folder, path, size, hashed, "growing" if grows else "record")


def unlisted(folder: RunFolder) -> List[str]:
    """What a trainer left below its DIR that `files` does not list (folders of its own, hidden files), below the run.

    What is unfinished, and checkpoints that are not complete, are nobody's loss.
    """
    found = []
    for path in sorted(folder.out.iterdir()) if folder.out.is_dir() else []:
        if path.name == "checkpoints":
            continue
        if path.name == _TENSORBOARD and _is_folder(path):
            events = _event_files(folder)
            found += [each for each in sorted(path.rglob("*")) if each not in events and not _is_folder(each)]
        elif path.name.startswith(".") or not stat.S_ISREG(path.lstat().st_mode):
            found.append(path)
    return [str(path.relative_to(folder.path)) for path in found if path.suffix not in UNFINISHED]


def _event_files(folder: RunFolder) -> List[Path]:
    """TensorBoard's, as the contract places them: no links, nothing deeper."""
    top = folder.out / _TENSORBOARD
    parts = [each for each in sorted(top.iterdir()) if _is_folder(each)] if _is_folder(top) else []
    return [path for part in parts for path in sorted(part.glob(_EVENT_FILES)) if _regular_size(path) is not None]


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _item(folder: RunFolder, path: Path, size: int, sha256: Optional[str], role: str) -> Dict[str, Any]:
    return {"path": str(path.relative_to(folder.path)), "size": size, "sha256": sha256, "role": role}


@dataclass(frozen=True)
class Checkpoint:
    """A complete one. `files` are the entries of its manifest, each there with the size that it tells."""

    path: Path
    step: int
    files: List[Dict[str, Any]]

    @property
    def size(self) -> int:
        """Bytes of its files."""
        return sum(int(item["size"]) for item in self.files)


def checkpoints(folder: RunFolder) -> List[Checkpoint]:
    """The complete checkpoints of a run, by step."""
    found = []
    for path in (folder.out / "checkpoints").glob("*"):
        if path.suffix in UNFINISHED or path.is_symlink():
            continue
        manifest = read_json(path / _MANIFEST) or {}
        step, files = manifest.get("step"), manifest.get("files")
        if isinstance(step, int) and isinstance(files, list) and all(_is_there(path, item) for item in files):
            found.append(Checkpoint(path, step, files))
    return sorted(found, key=lambda checkpoint: (checkpoint.step, checkpoint.path.name))


def _is_there(checkpoint: Path, item: Any) -> bool:
    if not isinstance(item, dict) or not isinstance(item.get("sha256"), str):
        return False
    path = item.get("path")
    if not isinstance(path, str) or not is_safe_relative(path) or Path(path).suffix in UNFINISHED:
        return False
    return _regular_size(checkpoint / path) == item.get("size")


def _files_of(folder: RunFolder, checkpoint: Checkpoint) -> List[Dict[str, Any]]:
    """Its listed files, then its manifest; nothing when it goes away meanwhile. The hashes are the manifest's own."""
    manifest = checkpoint.path / _MANIFEST
    try:
        size, sha256 = manifest.stat().st_size, sha256_file(manifest)
    except OSError:
        return []
    return [
        *(
            _item(folder, checkpoint.path / item["path"], item["size"], item["sha256"], str(item.get("role")))
            for item in checkpoint.files
        ),
        _item(folder, manifest, size, sha256, "manifest"),
    ]


def _regular_size(path: Path) -> Optional[int]:
    try:
        status = path.lstat()
    except OSError:
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def op_read(conversation: Conversation, args: Arguments) -> Dict[str, Any]:
    """`length` bytes from `offset`, at most to the end that the file has now; `sha256` is that of the bytes sent."""
    folder = find_run(conversation.work, args.optional_run())
    relative, offset = args.text("path"), args.size("offset", 0)
    length = None if args.values.get("length") is None else args.size("length")
    path = folder.path / relative
    inside = is_safe_relative(relative) and path.resolve() == folder.path.resolve() / relative
    if (
        not inside
        or relative == NOTIFY
        or path.suffix in UNFINISHED
        or ".part" in [Path(part).suffix for part in path.parts]
    ):
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
        left = size - offset if length is None else min(length, size - offset)
        # what the client verifies by a hash that it has already need not be hashed here again
        digest = hashlib.sha256() if args.flag("digest") else None
        room = memoryview(bytearray(min(_BLOCK, left)))
        while left > 0:
            count = file.readinto(room[: min(len(room), left)])
            if not count:
                raise _unreadable(relative, "it was cut off while it was read")
            left -= count
            if digest is not None:
                digest.update(room[:count])
            conversation.data(room[:count])
        return {"size": size, "sha256": None if digest is None else digest.hexdigest()}


def _unreadable(path: str, why: str) -> AgentError:
    return AgentError(
        "file", f"{path!r} cannot be read: {why}", "files of the run", "ask for the list of files again", ExitCode.USAGE
    )
