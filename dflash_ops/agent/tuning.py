"""`tune` of the trainer contract: every strategy measured on this host's GPUs."""

from __future__ import annotations

from typing import Any, Dict

from .arguments import Arguments
from .assets import refuse_changed
from .contract import verb_failed
from .conversation import Conversation
from .files import read_json, remove_tree
from .jobs import Job, new_scratch_id, run_verb
from .leases import leased, refuse_if_busy
from .occupied import refuse_if_occupied
from .orphans import clear_orphans

_NONE_RIGHT = 6
_HOUR_S = 3600


def op_tune(conversation: Conversation, args: Arguments) -> Dict[str, Any]:
    """The content of tuning.json, whose `fastest` is null where no strategy is right; the trainer keeps the table."""
    work = conversation.work
    conversation.lock.refuse_if_taken()
    job, timeout_s = Job.from_arguments(work, args), args.seconds("timeout_s", _HOUR_S)
    shared = args.optional_text("shared_gpus")
    refuse_if_busy(work, job.devices.names)
    clear_orphans(work)
    refuse_if_occupied(work, job.devices.names, shared)
    refuse_changed(work, job.assets)
    name = new_scratch_id()
    folder = work.scratch / name
    out = folder / "out"
    try:
        with leased(work, folder, "tune", job.devices.names, job.playbook):
            out.mkdir(mode=0o700)
            ending = run_verb(conversation, job, "tune", name=name, folder=folder, out=out, timeout_s=timeout_s)
        found = read_json(out / "tuning.json")
        agrees = found is not None and ending.code == (0 if isinstance(found.get("fastest"), str) else _NONE_RIGHT)
        if found is None or not agrees or ending.deadline:
            raise verb_failed("tune", ending, job, folder / "log", out)
    finally:
        remove_tree(folder)
    found = job.variables.masks.value(found)
    about = {"release": job.digest, "devices": job.devices.names, "playbook": job.playbook}
    work.record("tune", **about, key=found.get("key"), fastest=found.get("fastest"))
    return {"tuning": found}
