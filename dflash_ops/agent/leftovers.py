"""What an agent that was killed left half-made: told by its name, and cleared away by the next holder of the lock."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from typing import Iterator

from .files import remove_tree
from .workdir import WorkDir

_OWNED = re.compile(r"\..+\.(\d+)-[0-9a-f]+\.tmp|\.(?:current|previous)\.(\d+)|[0-9a-f]{64}\.pyz\.(\d+)")
"""`files.temporary`, `releases._flip` and the bootstrap put their pid into the name."""


def clear_leftovers(work: WorkDir) -> None:
    """To be called by the holder of the lock: nobody else stages."""
    for path in _staging(work):
        remove_tree(path)
    for path in _temporary(work):
        path.unlink(missing_ok=True)


def _staging(work: WorkDir) -> Iterator[Path]:
    """What is unpacked, set aside or pushed; of the archives that go on where they broke off those that nobody needs
    any more, and what is none."""
    for path in work.releases.iterdir():
        digest, _, kind = path.name.partition(".")
        if kind in ("part", "damaged", "tgz.piece"):
            yield path
        if kind == "tgz.part" and (work.release(digest).is_dir() or not stat.S_ISREG(path.lstat().st_mode)):
            yield path
    # what a build has begun stays: it may be going on, and the next one takes up what was downloaded
    yield from work.envs.glob("*.damaged")


def _temporary(work: WorkDir) -> Iterator[Path]:
    """Files whose writer is gone."""
    for pattern in (".*", "agent/*", "lock/.*", "verdicts/.*", "canary/*/.*", "runs/*/.*"):
        for path in work.root.glob(pattern):
            owned = _OWNED.fullmatch(path.name)
            if owned is not None and not os.path.exists(f"/proc/{next(filter(None, owned.groups()))}"):
                yield path
