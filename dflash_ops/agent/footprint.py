"""What a run will need of the disk, as far as this host can know it before: from what earlier ones took."""

from __future__ import annotations

from typing import Any, Dict

from .arguments import Arguments
from .collect import checkpoints
from .conversation import Conversation
from .runs import all_runs

_DRAFTER = ("target", "dtype", "draft_layers", "draft_ffn", "target_layers")
"""What of a workload the size of a checkpoint depends on."""


def op_footprint(conversation: Conversation, args: Arguments) -> Dict[str, Any]:
    """Size of a checkpoint of this module and drafter: the newest complete one of the newest run that has one."""
    module, workload = args.module(), args.table("workload")
    for folder in all_runs(conversation.work):
        before = folder.settings().get("workload")
        same = isinstance(before, dict) and all(before.get(key) == workload.get(key) for key in _DRAFTER)
        if not same or folder.record().get("module") != module:
            continue
        complete = checkpoints(folder)
        if complete:
            return {"checkpoint": {"bytes": complete[-1].size, "run": folder.run}}
    return {"checkpoint": None}
