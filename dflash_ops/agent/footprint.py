"""What a run will need of the disk, as far as this host can know it before: from what earlier ones took."""

from __future__ import annotations

from typing import Any, Dict, Optional, Tuple

from . import caches
from .arguments import Arguments
from .collect import checkpoints
from .conversation import Conversation
from .runs import all_runs
from .workdir import WorkDir

_DRAFTER = ("target", "dtype", "draft_layers", "draft_ffn", "target_layers")
"""What of a workload the size of a checkpoint depends on."""


def op_footprint(conversation: Conversation, args: Arguments) -> Dict[str, Any]:
    """Size of a checkpoint of this module and drafter; where `caches` is true also what assets and caches take now."""
    work, found = conversation.work, earlier_checkpoint(conversation.work, args.module(), args.table("workload"))
    return {
        "checkpoint": None if found is None else {"bytes": found[0], "run": found[1]},
        "caches": caches.sizes(work) if args.flag("caches") else None,
    }


def earlier_checkpoint(work: WorkDir, module: str, workload: Dict[str, Any]) -> Optional[Tuple[int, str]]:
    """Bytes of the newest complete one of the newest run of the same drafter that has one, and that run."""
    for folder in all_runs(work):
        before = folder.settings().get("workload")
        same = isinstance(before, dict) and all(before.get(key) == workload.get(key) for key in _DRAFTER)
        if not same or folder.record().get("module") != module:
            continue
        complete = checkpoints(folder)
        if complete:
            return complete[-1].size, folder.run
    return None
