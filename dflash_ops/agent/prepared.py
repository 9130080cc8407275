"""Data that a trainer's `prepare` makes: one folder for each key, complete when prepare.json is there."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, Dict, Optional

from .accounts import Account
from .arguments import Arguments
from .errors import AgentError, ExitCode
from .files import read_json, remove_tree
from .refusals import REFUSED_FILE
from .runs import all_runs
from .workdir import WorkDir

REPORT = "prepare.json"
INCOMPLETE = "incomplete"
"""Of a run that ended as if it had prepared its data, and has not."""
_KEY = re.compile(r"[0-9A-Za-z]{8,128}")


def is_key(value: Any) -> bool:
    return isinstance(value, str) and _KEY.fullmatch(value) is not None


def key_from(args: Arguments) -> str:
    """`key` of a request; AgentError `contract` for what names no folder."""
    key = args.text("key")
    if is_key(key):
        return key
    raise AgentError(
        "contract",
        f"prepare.key {key!r:.80} is not a digest",
        "check.json of the trainer",
        "correct the trainer: docs/trainer-contract.md",
        ExitCode.RUN_FAILED,
    )


def place_of(work: WorkDir, key: str) -> Path:
    return work.cache / "prepared" / key


def is_whole(path: Path) -> bool:
    return read_json(path / REPORT) is not None


def prepares_on_gpu(settings: Dict[str, Any]) -> bool:
    """Whether a trainer's `prepare` has work for a GPU: not where an endpoint answers and no hidden states are made."""
    training, workload = settings.get("training"), settings.get("workload")
    answered_elsewhere = isinstance(training, dict) and training.get("engine") == "openai"
    offline = isinstance(workload, dict) and workload.get("hidden_states") == "offline"
    return offline or not answered_elsewhere


def made_before(work: WorkDir, wanted: Any) -> Optional[str]:
    """Where the data that a check.json asks for in `prepare` lie already."""
    key = wanted.get("key") if isinstance(wanted, dict) else None
    if not is_key(key):
        return None
    path = place_of(work, str(key))
    return str(path) if is_whole(path) else None


def open_place(path: Path, account: Optional[Account]) -> None:
    """Makes the folder, or takes what an earlier `prepare` left there. Only for one that nobody is at."""
    if path.exists() and path.stat().st_uid != (os.geteuid() if account is None else account.uid):
        # begun as another account, whose files this one may not write
        remove_tree(path)
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    # of an earlier one
    remove_tree(path / REFUSED_FILE)


def refuse_if_being_made(work: WorkDir, path: Path, *, but: Optional[str] = None) -> None:
    """AgentError `busy` names the run that makes the data of this folder. `but`: the run whose restart asks."""
    for folder in all_runs(work):
        if folder.prepares() != path or folder.run == but:
            continue
        if folder.goes_on or folder.mark.pids():
            raise AgentError(
                "busy",
                f"run {folder.run} is preparing these data",
                str(path),
                f"follow it: dflash-ops tail-logs -f {folder.run}, or end it: dflash-ops stop {folder.run}",
                ExitCode.RUN_FAILED,
                folder.run,
            )
