"""The manifest of a release: every file's digest, and where the tree came from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from dflash_ops.release.errors import ReleaseError

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class TreeFile:
    """One file of a tree in memory; `mode` is 0o644 or 0o755, whatever the umask was."""

    data: bytes
    mode: int


class SourceKind(str, Enum):
    GIT = "git"
    BUNDLED = "bundled"
    NAMED = "named"  # a folder outside git of which only the named files were taken


@dataclass(frozen=True)
class SourceRecord:
    """`commit` is null outside git and before the first commit. `dirty` lists files of the release (paths
    inside it) that differ from that commit or are not in it, and tracked files that are gone."""

    kind: SourceKind
    commit: str | None = None
    dirty: tuple[str, ...] = ()


@dataclass(frozen=True)
class FileRecord:
    path: str
    size: int
    sha256: str
    mode: int


@dataclass(frozen=True)
class PatchRecord:
    name: str
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """Holds nothing that differs between two builds of the same input: no time, no path of this machine."""

    digest: str
    files: tuple[FileRecord, ...]
    source: SourceRecord
    patches: tuple[PatchRecord, ...]
    settings_sha256: str

    def to_dict(self) -> dict[str, Any]:
        return {
            "v": 1,
            "digest": self.digest,
            "files": [asdict(file) for file in self.files],
            "source": {
                "kind": self.source.kind.value,
                "commit": self.source.commit,
                "dirty": list(self.source.dirty),
            },
            "patches": [asdict(patch) for patch in self.patches],
            "settings_sha256": self.settings_sha256,
        }

    def to_bytes(self) -> bytes:
        return (json.dumps(self.to_dict(), indent=1, sort_keys=True) + "\n").encode("ascii")


def canonical_json(value: object) -> bytes:
    """The one spelling of a JSON value that digests are taken of. Raises TypeError or ValueError where the
    value has none (a set, NaN)."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def release_digest(files: Sequence[FileRecord]) -> str:
    """sha256 over the files' paths, sizes, modes and contents, and nothing else."""
    ordered = sorted(files, key=lambda file: file.path)
    return hashlib.sha256(canonical_json([asdict(file) for file in ordered])).hexdigest()


def settings_digest(settings: Mapping[str, object]) -> str:
    """Raises ReleaseError for settings that JSON cannot hold."""
    try:
        return hashlib.sha256(canonical_json(dict(settings))).hexdigest()
    except (TypeError, ValueError) as error:
        raise ReleaseError(
            f"the settings cannot be written as JSON: {error}",
            "settings",
            "use only text, numbers (not NaN), true, false, null, lists and maps with text keys",
        ) from error


def make_manifest(
    tree: Mapping[str, TreeFile],
    source: SourceRecord,
    patches: Sequence[PatchRecord],
    settings: Mapping[str, object],
) -> Manifest:
    files = tuple(
        FileRecord(path, len(file.data), hashlib.sha256(file.data).hexdigest(), file.mode)
        for path, file in sorted(tree.items())
    )
    return Manifest(release_digest(files), files, source, tuple(patches), settings_digest(settings))
