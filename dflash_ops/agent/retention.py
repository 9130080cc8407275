"""Which checkpoints of a run stay on the host: the last, the best, and those that somebody needs now."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Dict, List, Optional, Sequence, Set

from .arguments import Arguments
from .collect import UNFINISHED, Checkpoint, checkpoints
from .files import exclusive, fsync_folder, read_json, remove_tree, write_json
from .policy import Policy
from .processes import ProcessId, boot_id
from .runs import RunFolder, RunState, all_runs, find_run
from .scores import Scores
from .workdir import WorkDir

if TYPE_CHECKING:
    from .conversation import Conversation

_LOOK_S = 2.0


class Retention:
    """Belongs to the supervisor of a run. Of a run that nobody supervises nothing is removed."""

    def __init__(self, folder: RunFolder, policy: Policy) -> None:
        self._folder = folder
        self._policy = policy
        self._scores = Scores(folder.metrics)
        self._next_look = 0.0
        self._settled: Optional[List[str]] = None
        self.good_step: Optional[int] = None
        """Up to this step the weights are known to be finite: of those checkpoints the newest stays too."""

    def tend(self) -> None:
        """To be called often: it looks every two seconds, and acts when a checkpoint is new. May raise OSError."""
        if time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + _LOOK_S
        self._tend()

    def finish(self) -> None:
        """Once the job is gone: a last look, and what it left half written goes. May raise OSError."""
        for path in _entries(self._folder):
            if path.suffix in UNFINISHED:
                self._set_aside(path)
        self._tend()
        remove_tree(self._trash)

    def _tend(self) -> None:
        if self._policy.keep_last is None:
            return
        names = [path.name for path in _entries(self._folder) if path.suffix not in UNFINISHED]
        if names == self._settled:
            return
        complete = checkpoints(self._folder)
        kept = {one.path for one in complete[-self._policy.keep_last :]}
        self._scores.read()
        kept |= {one.path for one in best(complete, self._scores)[: self._policy.keep_best]}
        finite = [one.path for one in complete if self.good_step is not None and one.step <= self.good_step]
        lagging = not kept.issuperset(finite[-1:])
        kept |= set(finite[-1:])
        spare = [one.path for one in complete if one.path not in kept]
        # what is held now may go later, so then the next look is not the last
        self._settled = names if not spare and not lagging else None
        if spare:
            with exclusive(guard(self._folder)):
                held = pinned(self._folder) | resumed_from(self._folder)
                for path in spare:
                    if path.name not in held:
                        self._set_aside(path)
            remove_tree(self._trash)

    @property
    def _trash(self) -> Path:
        return self._folder.path / "trash"

    def _set_aside(self, path: Path) -> None:
        """A rename: whoever looks finds it whole or not at all."""
        self._trash.mkdir(mode=0o700, exist_ok=True)
        target = self._trash / path.name
        remove_tree(target)
        path.rename(target)
        fsync_folder(path.parent)


def best(complete: Sequence[Checkpoint], scores: Scores) -> List[Checkpoint]:
    """Best first, those that nothing is known of left out; of two that are equal the later one is better."""
    found = scores.of([one.step for one in complete])
    return sorted(
        (one for one in complete if one.step in found), key=lambda one: (found[one.step], one.step), reverse=True
    )


def _entries(folder: RunFolder) -> List[Path]:
    try:
        return sorted((folder.out / "checkpoints").iterdir())
    except FileNotFoundError:
        return []


def half_removed(folder: RunFolder) -> List[Path]:
    """What a run that was lost left: checkpoints that it was writing, or its supervisor removing."""
    trash = folder.path / "trash"
    return [*(path for path in _entries(folder) if path.suffix in UNFINISHED), *([trash] if trash.is_dir() else [])]


def guard(folder: RunFolder) -> Path:
    """Between the look at the pins and the removal nobody pins."""
    return folder.path / ".retention"


def resumed_from(folder: RunFolder) -> Set[str]:
    """Names of the checkpoints of `folder` from which a run that goes on was begun."""
    found = set()
    here = folder.out / "checkpoints"
    for other in all_runs(WorkDir(folder.root)):
        for source in other.begun_with():
            if source.parent == here and other.state() is RunState.RUNNING:
                found.add(source.name)
    return found


# ---- pins: what is being brought to a workstation is not removed under its reader


def op_pin(conversation: Conversation, args: Arguments) -> Dict[str, Any]:
    """These checkpoints, where they are there, stay as long as this conversation lives, or until it pins others."""
    return {"pinned": pin(find_run(conversation.work, args.optional_run()), args.names("checkpoints"))}


def pin(folder: RunFolder, wanted: Sequence[str]) -> List[str]:
    """Those of `wanted` that are complete: they stay while this process lives, or until it pins others of the run."""
    me = ProcessId.of(os.getpid())
    file = _pins(folder) / f"{os.getpid()}.json"
    with exclusive(guard(folder)):
        there = [one.path.name for one in checkpoints(folder) if one.path.name in wanted]
        if not there or me is None:
            file.unlink(missing_ok=True)
            return []
        try:
            file.parent.mkdir(mode=0o700, exist_ok=True)
            write_json(file, {"v": 1, "boot_id": boot_id(), "agent": me.to_json(), "checkpoints": there}, durable=False)
        except OSError as error:
            # a disk that went read-only: nothing on it can be removed
            if error.errno != errno.EROFS:
                raise
    return there


def pinned(folder: RunFolder) -> Set[str]:
    """What agents that live have pinned. The pins of dead ones are cleared away."""
    found: Set[str] = set()
    for path in _pins(folder).glob("*.json"):
        value = read_json(path) or {}
        agent = ProcessId.from_json(value.get("agent"))
        if value.get("boot_id") == boot_id() and agent is not None and agent.alive:
            found.update(str(name) for name in value.get("checkpoints", []))
        else:
            with contextlib.suppress(OSError):
                path.unlink()
    return found


def _pins(folder: RunFolder) -> Path:
    return folder.path / "pins"
