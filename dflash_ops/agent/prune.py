"""What this host no longer needs: old runs, releases, environments, assets, caches and agents. First a plan."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Set

from . import caches
from .arguments import Arguments
from .builds import Build
from .caches import PREPARED, TRASH, entries, used_bytes
from .collect import unlisted
from .conversation import Conversation
from .environments import ManagedEnvironment, digest_in
from .files import exclusive, fsync_folder, remove_tree
from .leases import leases
from .releases import linked, staged_releases
from .retention import guard, half_removed, pinned
from .rollback import releases_to_go_back_to
from .runs import RunFolder, all_runs
from .verdicts import Outcome, VerdictStore
from .workdir import WorkDir

GOES, STAYS, STUCK = "goes", "stays", "stuck"
_COLLECTED = "it is being collected"


@dataclass(frozen=True)
class Item:
    """One thing of this host. `bytes`: what it takes on the disk."""

    kind: str
    """run, release, environment, asset, prepared, cache, agent or leftover."""
    name: str
    path: Path
    fate: str
    """goes, stays, or stuck where the host would not let it go."""
    why: str
    bytes: int

    def to_json(self) -> Dict[str, Any]:
        return {**asdict(self), "path": str(self.path)}


@dataclass(frozen=True)
class Limits:
    """How many of each stay, the newest. `collected`: runs that the client has; None: it does not matter.
    `caches`: whether what trainers made for themselves goes."""

    runs: int
    releases: int
    environments: int
    prepared: int
    collected: Optional[Set[str]]
    assets: int = 0
    caches: bool = False


def op_prune(conversation: Conversation, args: Arguments) -> Dict[str, Any]:
    """`dry_run`: only the plan. Otherwise what goes is renamed out of sight first, and then removed."""
    work = conversation.work
    limits = Limits(
        args.size("keep_runs"),
        args.size("keep_releases"),
        args.size("keep_environments"),
        args.size("keep_prepared"),
        None if args.values.get("collected") is None else set(args.names("collected")),
        args.size("keep_assets"),
        args.flag("caches"),
    )
    if args.flag("dry_run"):
        return {"items": [item.to_json() for item in plan(work, limits)]}
    conversation.lock.refuse_if_taken()
    # what an earlier prune was killed over is told, and goes with the rest
    done = [removed(work, item) if item.fate == GOES else item for item in plan(work, limits)]
    gone = [item for item in done if item.fate == GOES]
    if gone:
        work.record("prune", gone=[f"{item.kind} {item.name}" for item in gone], bytes=sum(item.bytes for item in gone))
    return {"items": [item.to_json() for item in done]}


def plan(work: WorkDir, limits: Limits) -> List[Item]:
    """Everything, with what is to become of it and why."""
    runs = list(_runs(work, limits))
    staying = [RunFolder(item.path) for item in runs if item.fate == STAYS]
    return [
        *_leftovers(work),
        *runs,
        *_releases(work, limits, staying),
        *_environments(work, limits, staying),
        *_prepared(work, limits, staying),
        *_assets(work, limits, staying),
        *_caches(work, limits, staying),
        *_agents(work),
    ]


def _item(kind: str, path: Path, stays: Optional[str], goes: str) -> Item:
    fate, why = (GOES, goes) if stays is None else (STAYS, stays)
    return Item(kind, path.name, path, fate, why, used_bytes(path))


def _leftovers(work: WorkDir) -> Iterator[Item]:
    for folder in _folders(work):
        for path in entries(folder / TRASH):
            yield _item("leftover", path, None, "an earlier prune was killed over it")
    held = {lease.owner for lease in leases(work)}
    for run in all_runs(work):
        for path in half_removed(run) if run.run not in held else ():
            yield _item("leftover", path, None, f"run {run.run} ended before it was done with it")


def _folders(work: WorkDir) -> List[Path]:
    cached = [work.cache / PREPARED, work.cache, work.assets]
    return [work.runs, work.releases, work.envs, *cached, work.root / "agent"]


def _runs(work: WorkDir, limits: Limits) -> Iterator[Item]:
    held = {lease.owner: lease.how for lease in leases(work) if lease.kind == "run"}
    folders = all_runs(work)
    stay: Dict[str, str] = {}
    for number, folder in enumerate(folders):
        why = _own_reason(folder, number, held, limits)
        if why is not None:
            stay[folder.run] = why
    # no order helps: where the clock was set back, a child looks older than its parent
    named = {folder.run: folder for folder in folders}
    asked = list(stay)
    while asked:
        child = asked.pop()
        for parent in _begun_from(named[child]):
            if parent in named and parent not in stay:
                stay[parent] = f"run {child} goes on from it"
                asked.append(parent)
    for folder in folders:
        yield _item("run", folder.path, stay.get(folder.run), f"older than the {limits.runs} newest")


def _own_reason(folder: RunFolder, number: int, held: Dict[str, str], limits: Limits) -> Optional[str]:
    """Why this run stays, whatever becomes of others; `number` counts the newer ones."""
    if folder.run in held:
        return f"it {held[folder.run]}"
    if pinned(folder):
        return _COLLECTED
    if number < limits.runs:
        return f"one of the {limits.runs} newest"
    if limits.collected is None:
        return None
    if folder.run not in limits.collected:
        return f"it is not whole on your workstation: dflash-ops collect {folder.run}"
    unseen = unlisted(folder)
    return f"collect does not bring {unseen[0]}" if unseen else None


def _begun_from(folder: RunFolder) -> Set[str]:
    """Runs of this host that it goes on from: its parent, and the one whose checkpoint it began with."""
    found = {str(folder.record().get("parent"))}
    for source in folder.begun_with():
        if folder.path.parent in source.parents:
            found.add(source.relative_to(folder.path.parent).parts[0])
    return found


def _releases(work: WorkDir, limits: Limits, staying: List[RunFolder]) -> Iterator[Item]:
    used = {str(folder.record().get("release")): folder.run for folder in staying}
    current, previous = linked(work.root / "current"), linked(work.root / "previous")
    good = releases_to_go_back_to(work)
    paths = _newest_first([work.release(digest) for digest in staged_releases(work)])
    for number, path in enumerate(paths):
        if path.name == current:
            why: Optional[str] = "current"
        elif path.name == previous:
            why = "previous"
        elif path.name in good:
            why = "the last one before it whose canary passed: a rollback goes there"
        elif path.name in used:
            why = f"run {used[path.name]} has it"
        elif number < limits.releases:
            why = f"one of the {limits.releases} newest"
        else:
            why = None
        yield _item("release", path, why, f"older than the {limits.releases} newest, and no run that stays has it")


def _environments(work: WorkDir, limits: Limits, staying: List[RunFolder]) -> Iterator[Item]:
    """The newest is the one that was last asked for."""
    used = {digest_in(work, str(folder.record().get("python"))): folder.run for folder in staying}
    verdicts = VerdictStore.of(work).all()
    passed = [verdict.binding.get("environment") for verdict in verdicts if verdict.outcome is Outcome.PASS]
    folders = [path for path in entries(work.envs) if path.is_dir()]
    whole = _newest_first([path for path in folders if ManagedEnvironment.find(work, path.name) is not None])
    good = next((path for digest in passed for path in whole if path.name == digest), None)
    for number, path in enumerate(whole):
        if path.name in used:
            why: Optional[str] = f"run {used[path.name]} has it"
        elif number == 0:
            why = "current: the last one that was asked for"
        elif path == good:
            why = "the last one whose canary passed"
        elif number < limits.environments:
            why = f"one of the {limits.environments} newest"
        else:
            why = None
        yield _item(
            "environment", path, why, f"older than the {limits.environments} newest, and no run that stays has it"
        )
    for path in folders:
        if path not in whole:
            going_on = Build(work, path.name.partition(".")[0]).goes_on
            yield _item("environment", path, "it is being made" if going_on else None, "it was never finished")


def _prepared(work: WorkDir, limits: Limits, staying: List[RunFolder]) -> Iterator[Item]:
    used: Dict[str, str] = {}
    for folder in staying:
        settings = folder.settings()
        used[str(settings.get("prepared"))] = folder.run
        # whole or not: it is made now, or may be gone on with
        used[str(folder.prepares())] = folder.run
    paths = _newest_first(entries(work.cache / PREPARED))
    whole = [path for path in paths if (path / "prepare.json").exists()]
    for path in paths:
        if str(path) in used:
            yield _item("prepared", path, f"run {used[str(path)]} has it", "")
        elif path not in whole:
            why = "it is half made, and may go on within a day" if caches.may_go_on(path) else None
            yield _item("prepared", path, why, "it was never finished, and nothing came to it for a day")
        else:
            newest = whole.index(path) < limits.prepared
            why = f"one of the {limits.prepared} newest" if newest else None
            yield _item("prepared", path, why, f"older than the {limits.prepared} newest, and no run that stays has it")


def _assets(work: WorkDir, limits: Limits, staying: List[RunFolder]) -> Iterator[Item]:
    used = {name: f"run {folder.run}" for folder in staying for name in caches.assets_of(work, folder)}
    used.update(caches.assets_of_jobs(work))
    paths = _newest_first(entries(work.assets))
    whole = [path for path in paths if not path.name.endswith(".part")]
    for path in paths:
        if path not in whole:
            why = "its upload broke off, and may go on within a day" if caches.may_go_on(path) else None
            yield _item("asset", path, why, "its upload broke off, more than a day ago")
        elif path.name in used:
            yield _item("asset", path, f"{used[path.name]} has it", "")
        else:
            why = f"one of the {limits.assets} newest" if whole.index(path) < limits.assets else None
            yield _item("asset", path, why, f"older than the {limits.assets} newest, and no run that stays has it")


def _caches(work: WorkDir, limits: Limits, staying: List[RunFolder]) -> Iterator[Item]:
    running = [f"run {folder.run}" for folder in staying if folder.goes_on]
    running += [f"{lease.kind} {lease.owner}" for lease in leases(work)]
    why = caches.why_caches_stay(next(iter(running), None), limits.caches)
    for path in caches.made(work):
        yield _item("cache", path, why, "it was asked for; the next canary makes it anew")


def _agents(work: WorkDir) -> Iterator[Item]:
    living = caches.living_agents(work)
    for path in entries(work.root / "agent"):
        # what a killed bootstrap left is no agent
        if path.suffix == ".pyz":
            why = "a process of it lives" if caches.agent_digest(path) in living else None
            yield _item("agent", path, why, "no process of it lives, and it is sent again when it is needed")


def _newest_first(paths: List[Path]) -> List[Path]:
    return sorted(paths, key=lambda path: (path.lstat().st_mtime, path.name), reverse=True)


def removed(work: WorkDir, item: Item) -> Item:
    """What could not be removed is told, and stops nothing else."""
    try:
        if item.kind == "leftover":
            aside = item.path
        elif item.kind == "run":
            with exclusive(guard(RunFolder(item.path))):
                if pinned(RunFolder(item.path)):
                    return replace(item, fate=STAYS, why=_COLLECTED)
                aside = _set_aside(item.path)
        elif item.kind == "agent":
            aside = _set_aside(item.path)
            if caches.agent_digest(item.path) in caches.living_agents(work):
                # one began meanwhile, and found it there
                aside.rename(item.path)
                return replace(item, fate=STAYS, why="a process of it lives")
        else:
            aside = _set_aside(item.path)
        remove_tree(aside)
        if item.kind == "environment":
            Build(work, item.path.name.partition(".")[0]).forget()
    except OSError as error:
        return replace(item, fate=STUCK, why=str(error))
    return item


def _set_aside(path: Path) -> Path:
    """Out of sight in one step, on the same file system: whoever looks finds it whole or not at all."""
    trash = path.parent / TRASH
    trash.mkdir(mode=0o700, exist_ok=True)
    target = trash / path.name
    remove_tree(target)
    # to move a folder elsewhere one must be allowed to write into it; a release is read-only
    path.chmod(0o700)
    path.rename(target)
    fsync_folder(path.parent)
    return target
