"""A release is its content: the manifest's list of files, and the digest of a tree as it lies on the disk.

The release digest is the sha256 of the canonical JSON of `files`, sorted by path.
"""

from __future__ import annotations

import json
import os
import stat
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Dict, Iterable, List, Set

from .files import digest_of, is_safe_relative, open_regular, sha256_stream

NAME = "manifest.json"
PLAIN = 0o644
EXECUTABLE = 0o755
_KEYS = {"path", "size", "sha256", "mode"}


class BadTree(ValueError):  # noqa: N818
    """The manifest, the archive or the tree is not what the digest stands for; the message says where."""


@dataclass(frozen=True)
class Entry:
    """One file of a release: size in bytes, sha256 in hex, mode 0644 or 0755."""

    path: str
    size: int
    sha256: str
    mode: int

    @property
    def staged_mode(self) -> int:
        return 0o555 if self.mode & stat.S_IXUSR else 0o444

    @classmethod
    def from_json(cls, value: Any) -> "Entry":
        if not isinstance(value, dict) or set(value) != _KEYS:
            raise BadTree(f"{NAME}: a file needs exactly the keys {', '.join(sorted(_KEYS))}: {value!r:.120}")
        entry = cls(**value)
        if not isinstance(entry.path, str) or not is_safe_relative(entry.path) or entry.path == NAME:
            raise BadTree(f"{NAME}: {entry.path!r:.120} is not a plain relative path")
        if entry.mode not in (PLAIN, EXECUTABLE):
            raise BadTree(f"{entry.path}: mode {entry.mode!r} is neither 0644 nor 0755")
        if not isinstance(entry.size, int) or entry.size < 0 or not isinstance(entry.sha256, str):
            raise BadTree(f"{entry.path}: size or sha256 is not one")
        return entry


def release_digest(entries: Iterable[Entry]) -> str:
    return digest_of([asdict(entry) for entry in sorted(entries, key=lambda entry: entry.path)])


def parse_manifest(data: bytes, digest: str) -> Dict[str, Entry]:
    """The files of a manifest by path; BadTree unless they are well-formed and make up exactly `digest`."""
    try:
        value = json.loads(data.decode())
    except ValueError as error:
        raise BadTree(f"{NAME} is not JSON: {error}") from None
    if not isinstance(value, dict) or value.get("v") != 1 or not isinstance(value.get("files"), list):
        raise BadTree(f"{NAME} is not a manifest of version 1")
    entries = [Entry.from_json(item) for item in value["files"]]
    by_path = {entry.path: entry for entry in entries}
    if len(by_path) != len(entries):
        raise BadTree(f"{NAME} lists a file twice")
    for folder in sorted(parents_of(by_path)):
        if folder in by_path:
            raise BadTree(f"{NAME}: {folder} is a file and a folder")
    actual = release_digest(entries)
    if actual != digest:
        raise BadTree(f"the files of {NAME} make up {actual[:12]}…, not {digest[:12]}…")
    return by_path


def parents_of(paths: Iterable[str]) -> Set[str]:
    """Every folder that holds one of the files, the root left out."""
    return {str(parent) for path in paths for parent in PurePosixPath(path).parents if str(parent) != "."}


def tree_digest(root: Path) -> str:
    """The release digest of what lies under `root` now, hashed anew; `manifest.json` itself is left out.

    BadTree when something there is neither a regular file nor a folder that holds one.
    """
    entries: List[Entry] = []
    folders: Set[str] = set()
    for folder, below, names in os.walk(root):
        folders |= {str((Path(folder) / name).relative_to(root)) for name in below}
        for name in names:
            path = Path(folder) / name
            relative = str(path.relative_to(root))
            if relative != NAME:
                entries.append(_entry(path, relative))
    strangers = folders - parents_of(entry.path for entry in entries)
    if strangers:
        raise BadTree(f"{min(strangers)} is a folder without files")
    return release_digest(entries)


def _entry(path: Path, relative: str) -> Entry:
    try:
        with open_regular(path) as file:
            status = os.fstat(file.fileno())
            mode = EXECUTABLE if status.st_mode & stat.S_IXUSR else PLAIN
            return Entry(relative, status.st_size, sha256_stream(file), mode)
    except OSError as error:
        raise BadTree(f"{relative} cannot be read: {error}") from None
