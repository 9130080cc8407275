"""Small source trees in real git repositories."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path

IDENTITY = ("-c", "user.name=Test", "-c", "user.email=test@example.invalid", "-c", "commit.gpgsign=false")


def git(folder: Path, *arguments: str, stdin: bytes | None = None) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["git", *IDENTITY, *arguments], cwd=folder, input=stdin, capture_output=True, check=False)


def write(folder: Path, files: Mapping[str, str | bytes]) -> Path:
    for name, content in files.items():
        place = folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


def repository(folder: Path, files: Mapping[str, str | bytes]) -> Path:
    """A repository whose one commit holds `files`."""
    folder.mkdir(parents=True, exist_ok=True)
    assert git(folder, "init", "-q").returncode == 0
    write(folder, files)
    commit(folder)
    return folder


def commit(folder: Path) -> str:
    assert git(folder, "add", "-A", "-f").returncode == 0
    done = git(folder, "commit", "-q", "-m", "a state", "--allow-empty")
    assert done.returncode == 0, done.stderr
    return git(folder, "rev-parse", "HEAD").stdout.decode().strip()
