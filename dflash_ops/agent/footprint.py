"""What a run will need of the disk, as far as this host can know it before: from what earlier ones took."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, Optional, Tuple

from . import caches
from .arguments import Arguments
from .collect import checkpoints
from .conversation import Conversation
from .files import read_json
from .prepared import REPORT
from .runs import all_runs
from .workdir import WorkDir

_DRAFTER = ("target", "dtype", "master_weights", "draft_layers", "draft_ffn", "target_layers")
"""What of a workload the size of a checkpoint depends on."""
_DATA = ("target", "target_layers", "target_dtype", "hidden_states", "buckets")
"""The same of a row that is prepared."""


def op_footprint(conversation: Conversation, args: Arguments) -> Dict[str, Any]:
    """Size of a checkpoint of this module and drafter; where `prepares` is true of data prepared for it, and where
    `caches` is what assets and caches take now."""
    work, found = conversation.work, earlier_checkpoint(conversation.work, args.module(), args.table("workload"))
    return {
        "checkpoint": None if found is None else {"bytes": found[0], "run": found[1]},
        "prepared": earlier_data(work, args.module(), args.table("workload")) if args.flag("prepares") else None,
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


def earlier_data(work: WorkDir, module: str, workload: Dict[str, Any]) -> Optional[Dict[str, Any]]:
    """`path`, `bytes` and `rows` of the newest whole data that a run of the same kind made or was given."""
    for folder in all_runs(work):
        settings = folder.settings()
        before, path = settings.get("workload"), folder.prepares() or settings.get("prepared")
        same = isinstance(before, dict) and all(before.get(key) == workload.get(key) for key in _DATA)
        if not same or path is None or folder.record().get("module") != module:
            continue
        report = read_json(Path(path) / REPORT) or {}
        rows = [report.get(key, 0) for key in ("rows", "evaluation_prompts")]
        if all(isinstance(count, int) for count in rows) and sum(rows) > 0:
            return {"path": str(path), "bytes": caches.used_bytes(Path(path)), "rows": sum(rows)}
    return None
