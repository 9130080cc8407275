"""`check` and `prepare` of the trainer contract."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Dict

from .arguments import Arguments
from .conversation import Conversation
from .errors import AgentError, ExitCode
from .files import digest_of, read_json, remove_tree, tail_lines
from .jobs import Ending, Job, new_id, run_verb
from .leases import leased
from .orphans import mark_running

REFUSED = 2
_WRITTEN = {"check": "check.json", "prepare": "prepare.json", "tune": "tuning.json"}
_KEY = re.compile(r"[0-9A-Za-z]{8,128}")


def op_check(conversation: Conversation, args: Arguments) -> Dict[str, Any]:
    """The content of check.json, also where it says `refused`."""
    job, timeout_s = Job.from_arguments(conversation.work, args), args.seconds("timeout_s", 300)
    name = new_id()
    folder = conversation.work.scratch / name
    try:
        out = _new_folder(folder / "out")
        # the contract: no GPU work
        mark_running(folder, "check", [], job.playbook)
        ending = run_verb(conversation, job, "check", name=name, folder=folder, out=out, timeout_s=timeout_s)
        found = read_json(out / "check.json")
        if found is None or ending.deadline or ending.signal is not None:
            raise verb_failed("check", ending, folder / "log")
        return found
    finally:
        remove_tree(folder)


def op_prepare(conversation: Conversation, args: Arguments) -> Dict[str, Any]:
    """Makes the data of check.json's `prepare.key`, once for each key."""
    work = conversation.work
    conversation.lock.refuse_if_taken()
    job, timeout_s = Job.from_arguments(work, args), args.seconds("timeout_s", 3600)
    key = args.text("key")
    if not _KEY.fullmatch(key):
        raise AgentError(
            "contract",
            f"prepare.key {key!r:.80} is not a digest",
            "check.json of the trainer",
            "correct the trainer: docs/trainer-contract.md",
            ExitCode.RUN_FAILED,
        )
    path = work.cache / "prepared" / key
    if read_json(path / "prepare.json") is not None:
        return {"path": str(path), "reused": True}
    remove_tree(path)
    name = new_id()
    folder = work.scratch / name
    try:
        with leased(work, folder, "prepare", job.devices.names, job.playbook):
            out = _new_folder(path)
            ending = run_verb(conversation, job, "prepare", name=name, folder=folder, out=out, timeout_s=timeout_s)
        if ending.code != 0 or ending.deadline or read_json(path / "prepare.json") is None:
            raise verb_failed("prepare", ending, folder / "log")
    finally:
        remove_tree(folder)
    work.record("prepare", release=job.digest, key=key, settings=digest_of(job.settings))
    return {"path": str(path), "reused": False}


def _new_folder(path: Path) -> Path:
    path.mkdir(mode=0o700, parents=True)
    return path


def verb_failed(verb: str, ending: Ending, log: Path) -> AgentError:
    """What a verb that did not do its work is answered with."""
    lines = tail_lines(log)
    if ending.code == REFUSED:
        return AgentError(
            "refused",
            lines[-1] if lines else "the trainer refused its settings",
            f"trainer, verb {verb}",
            "correct the playbook",
            ExitCode.USAGE,
            lines,
        )
    missing = f" without a whole {_WRITTEN[verb]}" if ending.code == 0 else ""
    return AgentError(
        "trainer",
        f"`{verb}` {ending.describe()}{missing}",
        f"trainer, verb {verb}",
        "read its output above",
        ExitCode.RUN_FAILED,
        lines,
    )
