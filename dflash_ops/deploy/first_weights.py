"""`deploy --init-from`: the checkpoint whose weights a run begins with, from a folder here or a run of the host."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from dflash_ops.config import Asset, Playbook
from dflash_ops.config.asset import PREFIX
from dflash_ops.deploy.events import Events
from dflash_ops.deploy.naming import is_run_name
from dflash_ops.deploy.scratch import scratch_folder
from dflash_ops.errors import ExitCode, OpsError
from dflash_ops.limits import MOST
from dflash_ops.transport import Conversation
from dflash_ops.transport.messages import nonsense

MANIFEST = "manifest.json"
ASSET = "init-from"


@dataclass(frozen=True)
class OnHost:
    """A checkpoint of a run of the host; `step` None: its newest."""

    run: str
    step: int | None = None

    def __str__(self) -> str:
        return f"run {self.run}, {'its newest checkpoint' if self.step is None else f'step {self.step}'}"


@dataclass(frozen=True)
class Here:
    """A checkpoint's folder on this workstation, and what of it is sent: not what only a resumed run needs."""

    folder: Path
    files: tuple[str, ...]

    def __str__(self) -> str:
        return str(self.folder)


def parsed(text: str) -> OnHost | Here:
    """A folder that is there is one; anything else is RUN or RUN:STEP. Raises OpsError (exit 2)."""
    if not text:
        raise _refused("nothing is named")
    folder = Path(os.path.expanduser(text))  # noqa: PTH111 -- an unknown `~user` stays as it is
    if os.path.isdir(folder):  # noqa: PTH112 -- Path.is_dir raises for a name that is too long
        return _here(folder)
    run, colon, step = text.partition(":")
    if not is_run_name(run) or bool(colon) != (step.isdecimal() and len(step) <= len(str(MOST))):
        raise _refused(f"{text!r} is no folder here, and no RUN or RUN:STEP either")
    return OnHost(run, int(step) if colon else None)


def _here(folder: Path) -> Here:
    manifest = _manifest(folder)
    if manifest is None:
        inside = sorted(path.parent for path in folder.glob(f"checkpoints/*/{MANIFEST}"))
        hint = f"name one of its checkpoints: {inside[-1]}" if inside else ""
        raise _refused(f"{folder} is no complete checkpoint: it has no {MANIFEST} that can be read", hint)
    named = [(item.get("path"), item.get("role")) for item in manifest["files"] if isinstance(item, dict)]
    files = tuple(path for path, role in named if isinstance(path, str) and role != "resume")
    for path in files:
        # one level, as the contract has it; and nothing outside the folder is ever sent
        if len(PurePosixPath(path).parts) != 1 or path in ("..", "/"):
            raise _refused(f"{folder / MANIFEST} names {path!r}, which a checkpoint has not")
        if not (folder / path).is_file():
            raise _refused(f"{folder / path} is missing", "bring it home again: `dflash-ops collect RUN`")
    if not files:
        raise _refused(f"{folder / MANIFEST} names no weights")
    return Here(folder.absolute(), files)


def _manifest(folder: Path) -> dict[str, Any] | None:
    try:
        value = json.loads((folder / MANIFEST).read_bytes())
    except (OSError, ValueError):
        return None
    good = isinstance(value, dict) and value.get("kind") == "checkpoint" and isinstance(value.get("files"), list)
    return value if good else None


@contextmanager
def with_asset(playbook: Playbook, here: Here) -> Iterator[Playbook]:
    """The playbook with the checkpoint as one more asset, to be sent as any other. Inside the block only."""
    with scratch_folder() as folder:
        for name in (*here.files, MANIFEST):
            (folder / name).symlink_to((here.folder / name).resolve())
        asset = next(name for name in _names() if name not in playbook.assets)
        assets = {**playbook.assets, asset: Asset(upload=str(folder))}
        yield begun(playbook, PREFIX + asset).model_copy(update={"assets": assets})


def _names() -> Iterator[str]:
    yield ASSET
    number = 1
    while True:
        number += 1
        yield f"{ASSET}-{number}"


def on_the_host(conversation: Conversation, playbook: Playbook, wanted: OnHost | None, events: Events) -> Playbook:
    """The playbook with the path of that checkpoint; the host keeps it while the conversation lives.

    Raises OpsError (exit 2) that names the steps that are there.
    """
    if wanted is None:
        return playbook
    answer = conversation.request("checkpoint", {"run": wanted.run, "step": wanted.step})
    path, step = answer.get("path"), answer.get("step")
    if not isinstance(path, str) or not isinstance(step, int):
        raise nonsense("no answer about a checkpoint", wanted.run)
    events.emit("first_weights", run=wanted.run, step=step, path=path)
    return begun(playbook, path)


def begun(playbook: Playbook, init_from: str) -> Playbook:
    """Raises OpsError where it goes on from a checkpoint already."""
    if playbook.training.resume_from is not None:
        raise _refused("the playbook has training.resume_from: a run that goes on has its weights already")
    training = playbook.training.model_copy(update={"init_from": init_from})
    return playbook.model_copy(update={"training": training})


def _refused(what: str, fix: str = "") -> OpsError:
    return OpsError(
        what,
        exit_code=ExitCode.USAGE,
        kind="init_from",
        where="--init-from",
        fix=fix or "a checkpoint's folder (runs/RUN/checkpoints/step-000080), or RUN or RUN:STEP of the host",
    )
