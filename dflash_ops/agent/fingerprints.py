"""What a file or a folder holds, in one sha256. Shared with the client: both sides must come to the same.

A file's is that of its bytes. A folder's is that of the canonical JSON of `[path, size, sha256]` of each file below
it, sorted by path; names that begin with a dot (caches, git) are left out.
"""

from __future__ import annotations

import os
import stat
import time
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

from .files import digest_of, open_regular, read_json, sha256_stream, write_json

_SETTLED_S = 2.0
_KEPT = 10_000


class BadAsset(ValueError):  # noqa: N818
    """There is nothing that could have a fingerprint; the message says why."""


@dataclass(frozen=True)
class Listed:
    """One file: size in bytes, sha256 in hex."""

    path: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Content:
    """`single`: a file, which stands alone in `files` under its own name."""

    files: Tuple[Listed, ...]
    single: bool

    @cached_property
    def fingerprint(self) -> str:
        if self.single:
            return self.files[0].sha256
        return digest_of([[file.path, file.size, file.sha256] for file in sorted(self.files, key=lambda one: one.path)])

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)


@dataclass
class HashCache:
    """sha256 by what tells that a file is still the same: device, inode, size and modification time.

    Only a hint, kept in `path`: whoever may write it may write the files too.
    """

    path: Path
    _known: Dict[str, Any] = field(default_factory=dict)
    _changed: bool = False

    def __post_init__(self) -> None:
        self._known = read_json(self.path) or {}

    def hash(self, file: Path) -> Tuple[int, str]:
        """Size and sha256 of a regular file. OSError where there is none."""
        # a link to a file is what it leads to: model caches are made of them
        with open_regular(Path(os.path.realpath(file))) as stream:
            status = os.fstat(stream.fileno())
            key, mark = f"{status.st_dev}:{status.st_ino}", [status.st_size, status.st_mtime_ns]
            known = self._known.get(key)
            if isinstance(known, list) and known[:2] == mark and len(known) == 3:
                return status.st_size, str(known[2])
            sha256 = sha256_stream(stream, status.st_size)
            after = os.fstat(stream.fileno())
        if [after.st_size, after.st_mtime_ns] != mark:
            raise BadAsset(f"{file} changed while it was read")
        # a file that was written just now may be written again without a change of its time
        if time.time() - status.st_mtime > _SETTLED_S:
            self._known[key] = [*mark, sha256]
            self._changed = True
        return status.st_size, sha256

    def save(self) -> None:
        if self._changed:
            newest = list(self._known.items())[-_KEPT:]
            write_json(self.path, dict(newest), durable=False)
            self._changed = False


def content_of(root: Path, cache: HashCache) -> Content:
    """Hashes what is not known yet. BadAsset where something there is neither a file nor a folder; OSError."""
    if not os.path.lexists(root):
        raise BadAsset("there is nothing of that name")
    try:
        if not root.is_dir():
            return Content((Listed(root.name, *cache.hash(root)),), single=True)
        files = [Listed(path.relative_to(root).as_posix(), *cache.hash(path)) for path in _files(root)]
        if not files:
            raise BadAsset("the folder holds no file")
        return Content(tuple(sorted(files, key=lambda file: file.path)), single=False)
    finally:
        cache.save()


def _files(root: Path) -> List[Path]:
    found = []
    for folder, below, names in os.walk(root, onerror=_raise):
        below[:] = [name for name in below if not name.startswith(".")]
        for name in below:
            if (Path(folder) / name).is_symlink():
                raise BadAsset(f"{Path(folder) / name} is a link to a folder: name the folder itself")
        found += [Path(folder) / name for name in names if not name.startswith(".")]
    for path in found:
        try:
            mode = path.stat().st_mode
        except OSError as error:
            raise BadAsset(f"{path}: {error.strerror}") from error
        if not stat.S_ISREG(mode):
            raise BadAsset(f"{path} is neither a file nor a folder")
    return found


def _raise(error: Optional[OSError]) -> None:
    if error is not None:
        raise error
