"""Where everything lies on the host."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .files import append_line
from .spare import keep_spare

SYSTEM_PATH = "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin"


@dataclass(frozen=True)
class WorkDir:
    """The work directory of the protocol; `root` is absolute and exists."""

    root: Path

    @classmethod
    def open(cls, path: str) -> "WorkDir":
        # one spelling, whatever links lead here: records and processes are found by this path
        root = Path(os.path.realpath(os.path.expanduser(path)))
        work = cls(root)
        for folder in (work.releases, work.runs, work.canaries, work.verdicts, work.cache / "prepared", work.envs):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        keep_spare(root)
        return work

    @property
    def releases(self) -> Path:
        return self.root / "releases"

    @property
    def scratch(self) -> Path:
        return self.root / "scratch"

    @property
    def runs(self) -> Path:
        return self.root / "runs"

    @property
    def canaries(self) -> Path:
        return self.root / "canary"

    @property
    def verdicts(self) -> Path:
        return self.root / "verdicts"

    @property
    def cache(self) -> Path:
        return self.root / "cache"

    @property
    def assets(self) -> Path:
        """Not below the cache, which belongs to the job's account: what was verified must stay so."""
        return self.root / "assets"

    @property
    def envs(self) -> Path:
        """Managed environments by digest, and what belongs to the making of each."""
        return self.root / "envs"

    @property
    def lock(self) -> Path:
        return self.root / "lock"

    @property
    def lock_taken(self) -> Path:
        """The last time that the lock was taken from somebody: whose it was, and who took it."""
        return self.root / "lock-taken.json"

    @property
    def guard(self) -> Path:
        """The file whose kernel lock makes short decisions (who gets the lock, the GPUs) one at a time."""
        return self.root / ".guard"

    def release(self, digest: str) -> Path:
        return self.releases / digest

    def record(self, event: str, **fields: Any) -> None:
        """One line in events.ndjson."""
        append_line(self.root / "events.ndjson", {"v": 1, "time": time.time(), "event": event, **fields})
