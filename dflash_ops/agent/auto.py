"""What the kept tables of `tune` make of the strategy `auto`: part of what a verdict is bound to."""

from __future__ import annotations

import re
from typing import Any, Dict

from .files import read_json
from .workdir import WorkDir

AUTO = "auto"
_KEY = re.compile(r"[0-9a-f]{8,128}")


def choices(work: WorkDir, workload: Dict[str, Any]) -> Dict[str, str]:
    """Which strategy each kept table that fits the workload chooses, by the table's key; empty unless it says `auto`.

    Which of them the trainer takes hangs on GPUs and torch as well, which a verdict is bound to anyhow.
    """
    if workload.get("strategy") != AUTO:
        return {}
    found = {}
    for path in sorted((work.cache / "tuning").glob("*.json")):
        table = read_json(path) if _KEY.fullmatch(path.stem) else None
        fastest, shapes = (table or {}).get("fastest"), (table or {}).get("shapes")
        if isinstance(fastest, str) and isinstance(shapes, dict) and _fits(shapes, workload):
            found[path.stem] = fastest
    return found


def _fits(shapes: Dict[str, Any], workload: Dict[str, Any]) -> bool:
    return all(workload[name] == value for name, value in shapes.items() if name in workload)
