"""The checkpoint that a run can be continued from: complete, and what its manifest says, byte for byte."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

from .files import is_safe_relative, open_regular, read_json, sha256_stream
from .runs import RunFolder
from .watch import NON_FINITE
from .workdir import WorkDir

NOWHERE = -1
"""Before any step."""
_MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Checkpoint:
    """A folder with a manifest; `step` counts optimiser steps."""

    path: Path
    step: int
    files: List[Dict[str, Any]]

    @classmethod
    def at(cls, path: Path) -> "Optional[Checkpoint]":
        """None for what is no complete checkpoint: without a whole manifest there is none."""
        manifest = None if path.is_symlink() or path.suffix == ".part" else read_json(path / _MANIFEST)
        if manifest is None or not isinstance(manifest.get("files"), list) or not isinstance(manifest.get("step"), int):
            return None
        return cls(path, manifest["step"], manifest["files"])

    def damage(self) -> Optional[str]:
        """What is not as the manifest says, in words; None when every file has its size and sha256."""
        for item in self.files:
            name = item.get("path") if isinstance(item, dict) else None
            if not isinstance(name, str) or not is_safe_relative(name):
                return f"its manifest names {name!r:.80}"
            try:
                with open_regular(self.path / name) as file:
                    size = os.fstat(file.fileno()).st_size
                    if size != item.get("size"):
                        return f"{name} has {size} bytes, not {item.get('size')}"
                    if sha256_stream(file) != item.get("sha256"):
                        return f"{name} has another sha256 than its manifest says"
            except OSError as error:
                return f"{name} cannot be read: {error.strerror or error}"
        return None


@dataclass(frozen=True)
class Damaged:
    """A checkpoint that is not used, and why: it is damaged, or its weights may be no numbers."""

    path: Path
    why: str


def last_whole(work: WorkDir, folder: RunFolder) -> Tuple[Optional[Checkpoint], List[Damaged]]:
    """The newest checkpoint of the run that is whole, and the newer ones that are not used.

    After a loss that is none only those up to the last finite step count.
    A run that wrote none of its own is continued from where it began itself, and so on back to the first run.
    """
    damaged: List[Damaged] = []
    for found, bound in _newest_first(work, folder, finite_up_to):
        why = f"the last finite loss before it was at step {bound}" if _is_after(found, bound) else found.damage()
        if why is None:
            return found, damaged
        damaged.append(Damaged(found.path, why))
    return None, damaged


def last_finite(work: WorkDir, folder: RunFolder, good_step: Optional[int]) -> Optional[Checkpoint]:
    """What a run could be continued from whose exit.json does not say yet that it was finite up to `good_step`.

    Its files are not read.
    """

    def bound_of(one: RunFolder) -> Optional[int]:
        return (NOWHERE if good_step is None else good_step) if one.run == folder.run else finite_up_to(one)

    found = (one for one, bound in _newest_first(work, folder, bound_of) if not _is_after(one, bound))
    return next(found, None)


def finite_up_to(folder: RunFolder) -> Optional[int]:
    """The last step up to which the run's loss was a number; None: it always was."""
    reason = (folder.ended() or {}).get("reason")
    if not isinstance(reason, dict) or reason.get("kind") != NON_FINITE:
        return None
    good = reason.get("good_step")
    return good if isinstance(good, int) else NOWHERE


def _is_after(found: Checkpoint, bound: Optional[int]) -> bool:
    return bound is not None and found.step > bound


def _newest_first(
    work: WorkDir, folder: RunFolder, bound_of: Callable[[RunFolder], Optional[int]]
) -> Iterator[Tuple[Checkpoint, Optional[int]]]:
    """Each with the last finite step of its run."""
    seen = set()
    while folder.run not in seen:
        seen.add(folder.run)
        bound = bound_of(folder)
        yield from ((found, bound) for found in own_checkpoints(folder))
        parent = folder.record().get("parent")
        if not isinstance(parent, str):
            break
        folder = RunFolder(work.runs / parent)
    # the first run of all may have begun from a checkpoint that somebody brought there
    began = _began_from(folder)
    if began is not None:
        yield began, None


def own_checkpoints(folder: RunFolder) -> List[Checkpoint]:
    """Those that the run itself wrote, newest first."""
    own = [Checkpoint.at(path) for path in (folder.out / "checkpoints").glob("*")]
    return sorted((found for found in own if found is not None), key=lambda found: -found.step)


def _began_from(folder: RunFolder) -> Optional[Checkpoint]:
    training = folder.settings().get("training")
    path = training.get("resume_from") if isinstance(training, dict) else None
    return Checkpoint.at(Path(path)) if isinstance(path, str) else None
