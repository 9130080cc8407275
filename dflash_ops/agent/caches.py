"""What the work directory has beside runs and releases, how large it is, and who has it: assets, caches, agents."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Set

from .builds import Build
from .files import read_json
from .orphans import living_jobs
from .processes import pids
from .runs import RunFolder
from .workdir import WorkDir

TRASH = ".trash"
PREPARED = "prepared"
_KEPT = (PREPARED, "tuning", "throughput")
"""Of the trainers' cache: prepared data have rules of their own, what was measured is small and took long."""
_UNFINISHED_S = 86400.0
"""An upload that broke off may go on where it was for so long."""


def entries(folder: Path) -> List[Path]:
    try:
        return sorted(path for path in folder.iterdir() if path.name != TRASH)
    except FileNotFoundError:
        return []


def used_bytes(path: Path) -> int:
    """What a tree takes on the disk; links are not followed."""
    total = path.lstat().st_blocks
    for folder, below, names in os.walk(path):
        for name in [*below, *names]:
            try:
                total += os.lstat(os.path.join(folder, name)).st_blocks
            except OSError:
                # gone meanwhile
                continue
    return total * 512


def made(work: WorkDir) -> List[Path]:
    """What the trainers made for themselves and would make again: compiled kernels, converted targets."""
    return [path for path in entries(work.cache) if path.name not in _KEPT]


def sizes(work: WorkDir) -> Dict[str, int]:
    """Bytes of each kind. It looks at every file: compiled kernels may be many thousands."""
    places = {
        "environments": entries(work.envs),
        "assets": entries(work.assets),
        "prepared": entries(work.cache / PREPARED),
        "caches": made(work),
    }
    return {kind: sum(used_bytes(path) for path in paths) for kind, paths in places.items()}


def assets_of(work: WorkDir, folder: RunFolder) -> Set[str]:
    """Names of the uploaded assets that a run was started with, or whose path stands in its settings."""
    return _below(work.assets, [folder.record().get("assets"), folder.settings()])


def assets_of_jobs(work: WorkDir) -> Dict[str, str]:
    """The same of checks, canaries and the like of agents that live, and of environments that are made, by whom."""
    found = {}
    for job in living_jobs(work):
        for name in _below(work.assets, [read_json(job.folder / "settings.json")]):
            found[name] = f"{job.verb} {job.name}"
    for order in work.envs.glob("*.part/order.json"):
        build = Build(work, order.parent.name.partition(".")[0])
        # it outlives the conversation that began it
        for name in _below(work.assets, [read_json(order)]) if build.goes_on else ():
            found[name] = f"environment {build.digest[:12]}"
    return found


def _below(root: Path, values: List[Any]) -> Set[str]:
    """The entries of `root` that the texts in `values` lead to."""
    found = set()
    for text in _texts(values):
        path = Path(text)
        if root in path.parents:
            found.add(path.relative_to(root).parts[0])
    return found


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)


def may_go_on(path: Path) -> bool:
    """Whether something came to an unfinished upload, or to data half prepared, within the last day."""
    newest = path.lstat().st_mtime
    for folder, _, names in os.walk(path):
        # those that are complete have a time of their own, the folder that took them has not
        for one in (folder, *(os.path.join(folder, name) for name in names)):
            try:
                newest = max(newest, os.lstat(one).st_mtime)
            except OSError:
                continue
    return time.time() - newest < _UNFINISHED_S


def living_agents(work: WorkDir) -> Set[str]:
    """Digests of the agents that some process is, or is about to become: agents and supervisors read their file on."""
    folder = work.root / "agent"
    names = {agent_digest(path) for path in [*entries(folder), *entries(folder / TRASH)]}
    digests = {name: name.encode() for name in names}
    found: Set[str] = set()
    for pid in pids():
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        found.update(name for name, digest in digests.items() if digest in words)
    return found


def agent_digest(path: Path) -> str:
    """An agent and what compiled.py has made of it are one."""
    return path.name.partition(".")[0]


def why_caches_stay(running: Optional[str], asked: bool) -> Optional[str]:
    """None: they may go. `running`: who may be using them now."""
    if running is not None:
        return f"{running} may be using it"
    return None if asked else "it takes minutes to make anew: `dflash-ops prune --caches` removes it"
