"""What a host says that a run has: files, and the complete checkpoints among them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from dflash_ops.errors import TransportError

CHECKPOINTS = PurePosixPath("out/checkpoints")
CONTRACT_FILES = ("metrics.ndjson", "prepare.json", "result.json", "tensorboard")
OPTIMIZER = "resume"
"""The role of what only a resumed run needs."""


@dataclass(frozen=True)
class RemoteFile:
    path: PurePosixPath
    """Below the run's folder on the host."""
    size: int
    sha256: str | None
    """None for what still grows: then the digest told with the bytes counts."""
    role: str

    @property
    def home(self) -> PurePosixPath:
        """Where it lies in `runs/<run>/`: the contract's files at the top, anything else of the trainer's in `out/`.

        So that nothing which a trainer writes can take the place of a record.
        """
        parts = self.path.parts
        return PurePosixPath(*parts[1:]) if parts[0] == "out" and parts[1] in CONTRACT_FILES else self.path


@dataclass(frozen=True)
class RemoteCheckpoint:
    """A complete one. `files` by their path inside it, the manifest left out."""

    name: str
    manifest: RemoteFile
    files: Mapping[str, RemoteFile]

    def wanted(self, *, optimizer: bool) -> dict[str, RemoteFile]:
        return {path: file for path, file in self.files.items() if optimizer or file.role != OPTIMIZER}


@dataclass(frozen=True)
class Listing:
    """`state` was asked before the files were listed: what an ended run lists is all that there will be."""

    state: str
    files: tuple[RemoteFile, ...]
    checkpoints: tuple[RemoteCheckpoint, ...]
    """By step."""

    @classmethod
    def of(cls, answer: Mapping[str, Any]) -> Listing:
        """The agent's answer to `files`. Raises TransportError for a path outside the run."""
        plain: list[RemoteFile] = []
        found: dict[str, dict[str, RemoteFile]] = {}
        for entry in answer["files"]:
            file = _remote(entry)
            if file.path.is_relative_to(CHECKPOINTS) and len(file.path.parts) > len(CHECKPOINTS.parts) + 1:
                inside = file.path.relative_to(CHECKPOINTS)
                found.setdefault(inside.parts[0], {})[str(PurePosixPath(*inside.parts[1:]))] = file
            else:
                plain.append(file)
        whole = (
            RemoteCheckpoint(name, files["manifest.json"], {k: v for k, v in files.items() if k != "manifest.json"})
            for name, files in found.items()
            if "manifest.json" in files
        )
        return cls(str(answer["state"]), tuple(plain), tuple(whole))


def _remote(entry: Mapping[str, Any]) -> RemoteFile:
    path = PurePosixPath(entry["path"])
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise TransportError(f"the host names a file outside the run: {entry['path']!r}", kind="protocol")
    sha256 = entry["sha256"]
    return RemoteFile(path, int(entry["size"]), None if sha256 is None else str(sha256), str(entry["role"]))
