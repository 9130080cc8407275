"""`check` and `prepare` of the trainer contract."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict

from .arguments import Arguments
from .conversation import Conversation
from .errors import AgentError, ExitCode
from .files import digest_of, read_json, remove_tree, tail_lines
from .jobs import Ending, Job, new_scratch_id, run_verb
from .leases import leased
from .orphans import mark_running
from .prepared import is_whole, key_from, made_before, open_place, place_of, refuse_if_being_made
from .refusals import REFUSED, Refusal

_WRITTEN = {"check": "check.json", "prepare": "prepare.json", "tune": "tuning.json"}


def op_check(conversation: Conversation, args: Arguments) -> Dict[str, Any]:
    """The content of check.json, also where it says `refused`; `prepared`: where the data that it wants lie already."""
    job, timeout_s = Job.from_arguments(conversation.work, args), args.seconds("timeout_s", 300)
    name = new_scratch_id()
    folder = conversation.work.scratch / name
    try:
        out = _new_folder(folder / "out")
        # the contract: no GPU work
        mark_running(folder, "check", [], job.playbook)
        ending = run_verb(conversation, job, "check", name=name, folder=folder, out=out, timeout_s=timeout_s)
        found = read_json(out / "check.json")
        if found is None or ending.deadline or ending.signal is not None:
            raise verb_failed("check", ending, job, folder / "log", out)
        return {**found, "prepared": made_before(conversation.work, found.get("prepare"))}
    finally:
        remove_tree(folder)


def op_prepare(conversation: Conversation, args: Arguments) -> Dict[str, Any]:
    """Makes the data of check.json's `prepare.key`, once for each key; one that broke off goes on."""
    work = conversation.work
    conversation.lock.refuse_if_taken()
    job, timeout_s = Job.from_arguments(work, args, prepares=True), args.seconds("timeout_s", 3600)
    key = key_from(args)
    path = place_of(work, key)
    if is_whole(path):
        return {"path": str(path), "reused": True}
    refuse_if_being_made(work, path)
    name = new_scratch_id()
    folder = work.scratch / name
    try:
        with leased(work, folder, "prepare", job.devices.names, job.playbook):
            open_place(path, job.account)
            ending = run_verb(conversation, job, "prepare", name=name, folder=folder, out=path, timeout_s=timeout_s)
        if ending.code != 0 or ending.deadline or not is_whole(path):
            raise verb_failed("prepare", ending, job, folder / "log", path)
    finally:
        remove_tree(folder)
    work.record("prepare", release=job.digest, key=key, settings=digest_of(job.settings))
    return {"path": str(path), "reused": False}


def _new_folder(path: Path) -> Path:
    path.mkdir(mode=0o700, parents=True)
    return path


def verb_failed(verb: str, ending: Ending, job: Job, log: Path, out: Path) -> AgentError:
    """What a verb that did not do its work is answered with."""
    lines = tail_lines(log)
    if ending.code == REFUSED and not ending.deadline:
        return Refusal.read(out, lines, job.variables.masks).error(verb, lines)
    again = "it goes on where it was: type it again, with a larger run.prepare_timeout_s, or: dflash-ops prepare"
    missing = f" without a whole {_WRITTEN[verb]}" if ending.code == 0 else ""
    return AgentError(
        "trainer",
        f"`{verb}` {ending.describe()}{missing}",
        f"trainer, verb {verb}",
        again if verb == "prepare" and ending.deadline else "read its output above",
        ExitCode.RUN_FAILED,
        lines,
    )
