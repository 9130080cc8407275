"""What a run can be continued from: its own settings, and its last whole checkpoint or the data half prepared."""

from __future__ import annotations

import shlex
from typing import Any, Dict, Iterator, List, Optional

from .arguments import Arguments
from .checkpoints import NOWHERE, Checkpoint, finite_up_to, last_whole, own_checkpoints
from .conversation import Conversation
from .errors import AgentError, ExitCode
from .files import read_json
from .runs import RunFolder, RunState, all_runs, find_run
from .workdir import WorkDir


def op_resumable(conversation: Conversation, args: Arguments) -> Dict[str, Any]:
    """Event `damaged` for each checkpoint that is passed over.

    AgentError `alive`, `damaged_run`, `no_checkpoint` or `gone_on`.
    """
    work = conversation.work
    folder = find_run(work, args.optional_run())
    refuse_if_alive(folder)
    record, settings = folder.record(), read_json(folder.path / "settings.json")
    if not record or settings is None:
        raise AgentError(
            "damaged_run",
            f"the record of run {folder.run} cannot be read",
            str(folder.path),
            "deploy anew; its checkpoints can be named in training.resume_from",
            ExitCode.RUN_FAILED,
        )
    found = None if folder.prepares() is not None else _last_whole(conversation, folder)
    _refuse_if_gone_on(work, folder, found)
    return {
        "run": folder.run,
        "state": folder.state().value,
        "release": record.get("release"),
        "module": record.get("module"),
        "playbook": record.get("playbook"),
        "policy": record.get("policy"),
        "max_age_s": record.get("max_age_s"),
        "settings": settings,
        "assets": record.get("assets") or {},
        "python": record.get("python"),
        "managed": record.get("managed"),
        "prepares": record.get("prepares"),
        "checkpoint": None if found is None else str(found.path),
        "step": 0 if found is None else found.step,
    }


def _last_whole(conversation: Conversation, folder: RunFolder) -> Checkpoint:
    """AgentError `no_checkpoint`."""
    found, damaged = last_whole(conversation.work, folder)
    for one in damaged:
        conversation.event("damaged", path=str(one.path), why=one.why)
    if found is not None:
        return found
    raise AgentError(
        "no_checkpoint",
        f"run {folder.run} has no checkpoint to go on from"
        + (f": all {len(damaged)} are damaged" if damaged else ": it ended before its first was complete"),
        str(folder.out / "checkpoints"),
        "begin anew: dflash-ops deploy",
        ExitCode.RUN_FAILED,
        [f"{one.path.name}: {one.why}" for one in damaged],
    )


def refuse_if_alive(folder: RunFolder) -> None:
    """AgentError `alive` where the run, or what is left of it, still goes on, or is about to start again."""
    state = folder.state()
    if state is RunState.RUNNING:
        raise _alive(folder, "is running: there is nothing to resume", f"see it: dflash-ops tail-logs -f {folder.run}")
    if folder.starts_again:
        what = "is about to be started again by its host"
        raise _alive(folder, what, f"see it: dflash-ops tail-logs -f {folder.run}, or end that: dflash-ops stop")
    left = folder.mark.pids()
    if left:
        what = f"is {state.value}, but its processes {left} live"
        raise _alive(folder, what, f"end them: dflash-ops stop {folder.run}; then resume")


def _refuse_if_gone_on(work: WorkDir, folder: RunFolder, found: Optional[Checkpoint]) -> None:
    """AgentError `gone_on` where a run that continued this one still goes on, or came further: its steps would be
    trained once more, beside it. Data are prepared once, whoever does it: there only what goes on is in the way."""
    for later in _descendants(work, folder):
        own = _finite_steps(later)
        if not later.goes_on and (found is None or own <= found.step):
            continue
        state = later.state().value
        if found is None or later.goes_on:
            what, fix = f"which is {state}", f"see it: dflash-ops tail-logs -f {later.run}"
        else:
            what = f"which is {state} and has a checkpoint at step {own}; its own last is at step {found.step}"
            fix = f"go on with that one: dflash-ops resume {later.run}"
        raise AgentError(
            "gone_on",
            f"run {folder.run} went on as run {later.run}, {what}",
            "runs of the host",
            fix if found is None else f"{fix}; {_way_back(folder, found)}",
            ExitCode.RUN_FAILED,
            later.run,
        )


def _way_back(folder: RunFolder, found: Checkpoint) -> str:
    playbook = folder.record().get("playbook")
    named = f" --playbook {shlex.quote(playbook)}" if isinstance(playbook, str) else ""
    back = f"dflash-ops deploy{named} --set training.resume_from={shlex.quote(str(found.path))}"
    return f"to go back to step {found.step} all the same: {back}"


def _descendants(work: WorkDir, folder: RunFolder) -> Iterator[RunFolder]:
    """Runs that continue it, or one of those; the furthest first."""
    children: Dict[Optional[str], List[RunFolder]] = {}
    for other in all_runs(work):
        children.setdefault(other.record().get("parent"), []).append(other)
    found: List[RunFolder] = []
    names = [folder.run]
    while names:
        # taken out: a damaged record may name its own child as its parent
        below = children.pop(names.pop(), [])
        found += below
        names += [one.run for one in below]
    yield from sorted(found, key=lambda one: (one.goes_on, _finite_steps(one)), reverse=True)


def _finite_steps(folder: RunFolder) -> int:
    """Of its newest own checkpoint that can be gone on from."""
    bound = finite_up_to(folder)
    steps = [one.step for one in own_checkpoints(folder) if bound is None or one.step <= bound]
    return max(steps, default=NOWHERE)


def refuse_if_stopped(parent: RunFolder) -> None:
    """AgentError `stopped`. To be called under the guard, as a stop is asked for under it."""
    if parent.stop_file.exists():
        raise AgentError(
            "stopped",
            f"run {parent.run} was stopped before it was started again",
            "supervisor of the host",
            f"go on by hand: dflash-ops resume {parent.run}",
            ExitCode.RUN_FAILED,
        )


def _alive(folder: RunFolder, what: str, fix: str) -> AgentError:
    return AgentError("alive", f"run {folder.run} {what}", "runs of the host", fix, ExitCode.RUN_FAILED, folder.run)
