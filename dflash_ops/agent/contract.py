"""`check` and `prepare` of the trainer contract."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, Dict, Optional

from .arguments import Arguments
from .conversation import Conversation
from .errors import AgentError, ExitCode
from .files import digest_of, read_json, remove_tree, tail_lines
from .jobs import Ending, Job, new_scratch_id, run_verb
from .leases import leased
from .orphans import mark_running
from .refusals import REFUSED, REFUSED_FILE, Refusal
from .workdir import WorkDir

_WRITTEN = {"check": "check.json", "prepare": "prepare.json", "tune": "tuning.json"}
_KEY = re.compile(r"[0-9A-Za-z]{8,128}")


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
        return {**found, "prepared": _made_before(conversation.work, found.get("prepare"))}
    finally:
        remove_tree(folder)


def op_prepare(conversation: Conversation, args: Arguments) -> Dict[str, Any]:
    """Makes the data of check.json's `prepare.key`, once for each key; one that broke off goes on."""
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
    path = _place_of(work, key)
    if _is_whole(path):
        return {"path": str(path), "reused": True}
    if path.exists() and path.stat().st_uid != (os.geteuid() if job.account is None else job.account.uid):
        # begun as another account, whose files this one may not write
        remove_tree(path)
    name = new_scratch_id()
    folder = work.scratch / name
    try:
        with leased(work, folder, "prepare", job.devices.names, job.playbook):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            # of an earlier one that was killed or refused
            remove_tree(path / REFUSED_FILE)
            ending = run_verb(conversation, job, "prepare", name=name, folder=folder, out=path, timeout_s=timeout_s)
        if ending.code != 0 or ending.deadline or not _is_whole(path):
            raise verb_failed("prepare", ending, job, folder / "log", path)
    finally:
        remove_tree(folder)
    work.record("prepare", release=job.digest, key=key, settings=digest_of(job.settings))
    return {"path": str(path), "reused": False}


def _made_before(work: WorkDir, wanted: Any) -> Optional[str]:
    key = wanted.get("key") if isinstance(wanted, dict) else None
    if not isinstance(key, str) or not _KEY.fullmatch(key):
        return None
    path = _place_of(work, key)
    return str(path) if _is_whole(path) else None


def _place_of(work: WorkDir, key: str) -> Path:
    return work.cache / "prepared" / key


def _is_whole(path: Path) -> bool:
    return read_json(path / "prepare.json") is not None


def _new_folder(path: Path) -> Path:
    path.mkdir(mode=0o700, parents=True)
    return path


def verb_failed(verb: str, ending: Ending, job: Job, log: Path, out: Path) -> AgentError:
    """What a verb that did not do its work is answered with."""
    lines = tail_lines(log)
    if ending.code == REFUSED and not ending.deadline:
        return Refusal.read(out, lines, job.variables.masks).error(verb, lines)
    missing = f" without a whole {_WRITTEN[verb]}" if ending.code == 0 else ""
    return AgentError(
        "trainer",
        f"`{verb}` {ending.describe()}{missing}",
        f"trainer, verb {verb}",
        "read its output above",
        ExitCode.RUN_FAILED,
        lines,
    )
