"""What the static rules found in a release, remembered on this workstation: the same content is not read again.

An entry speaks for exactly one release, these rules and this Python. What is damaged, or may have been written by
another account, counts as absent; what cannot be written is not remembered. Nothing that depends on a host is here.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import stat
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dflash_ops.files import write_bytes
from dflash_ops.release.finding import Finding, Severity
from dflash_ops.release.manifest import canonical_json

KEPT = 50
"""Entries; the oldest go."""
MAX_BYTES = 4 << 20
UNSURE = "not-checked"
"""How deep an expression may be depends on more than the file: such an answer is not kept."""


class CheckMemory:
    """`folder`: `KEY.json` for each release, and nothing else."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @classmethod
    def at(cls, env: Mapping[str, str]) -> CheckMemory:
        """`$XDG_CACHE_HOME/dflash-ops/checks`; the specification says to ignore a relative value."""
        base = env.get("XDG_CACHE_HOME", "")
        home = Path(env["HOME"]) if env.get("HOME") else Path.home()
        return cls((Path(base) if Path(base).is_absolute() else home / ".cache") / "dflash-ops" / "checks")

    def recall(self, release: str) -> list[Finding] | None:
        """The findings of the release of that digest; None where they are not known."""
        key = _key(release)
        if key is None:
            return None
        try:
            kept = json.loads(_own_bytes(self._folder / f"{key}.json"))
            content = kept["content"]
            if kept["sha256"] != _digest(content) or content["key"] != key:
                return None
            return [Finding(**{**each, "severity": Severity(each["severity"])}) for each in content["findings"]]
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            return None

    def keep(self, release: str, findings: Sequence[Finding]) -> None:
        key = _key(release)
        if key is None or any(finding.rule == UNSURE for finding in findings):
            return
        content = {"key": key, "findings": [asdict(finding) for finding in findings]}
        data = json.dumps({"sha256": _digest(content), "content": content}).encode()
        # a full disk or a home that is read-only: the rules run again
        with suppress(OSError):
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_bytes(self._folder / f"{key}.json", data)
            entries = sorted(self._folder.glob("*.json"), key=lambda path: path.stat().st_mtime, reverse=True)
            for old in entries[KEPT:]:
                old.unlink(missing_ok=True)


def _own_bytes(path: Path) -> bytes:
    """Raises OSError for what others may have written."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(handle, "rb") as file:
        status = os.fstat(file.fileno())
        foreign = status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if foreign or not stat.S_ISREG(status.st_mode) or status.st_size > MAX_BYTES:
            raise PermissionError(path)
        return file.read()


def _digest(value: Any) -> str:
    return hashlib.sha256(canonical_json(value)).hexdigest()


def _key(release: str) -> str | None:
    rules = _rules()
    return None if rules is None else _digest([release, rules, sys.version, sys.implementation.name])


@functools.cache
def _rules() -> str | None:
    """The digest of the rules' own sources, and of all that they are made with; None where those are not to be had."""
    here = Path(__file__).parent
    sources = {str(path.relative_to(here)): path for path in sorted(here.rglob("*.py"))}
    if not sources:
        return None
    return _digest({name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in sources.items()})
