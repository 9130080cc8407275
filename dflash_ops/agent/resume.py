"""What a run can be continued from: its own settings, and its last whole checkpoint."""

from __future__ import annotations

from typing import Any, Dict

from .arguments import Arguments
from .checkpoints import last_whole
from .conversation import Conversation
from .errors import AgentError, ExitCode
from .files import read_json
from .runs import RunFolder, RunState, find_run


def op_resumable(conversation: Conversation, args: Arguments) -> Dict[str, Any]:
    """Event `damaged` for each checkpoint that is passed over; AgentError `alive`, `damaged_run` or `no_checkpoint`."""
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
    found, damaged = last_whole(work, folder)
    for one in damaged:
        conversation.event("damaged", path=str(one.path), why=one.why)
    if found is None:
        raise AgentError(
            "no_checkpoint",
            f"run {folder.run} has no checkpoint to go on from"
            + (f": all {len(damaged)} are damaged" if damaged else ": it ended before its first was complete"),
            str(folder.out / "checkpoints"),
            "begin anew: dflash-ops deploy",
            ExitCode.RUN_FAILED,
            [f"{one.path.name}: {one.why}" for one in damaged],
        )
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
        "checkpoint": str(found.path),
        "step": found.step,
    }


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
