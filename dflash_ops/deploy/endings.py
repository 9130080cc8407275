"""How a run ended, in words, and what to type next."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Any

from dflash_ops.deploy.events import Events

BAD_STATES = ("FAILED", "OOM", "LOST")
Exit = dict[str, Any]
"""The host's exit.json (docs/agent-protocol.md)."""


def why(ended: Exit | None) -> str:
    """Why its supervisor ended it, or what its trainer refused; empty for all else. None: it goes on, or is lost."""
    return str(reason_of(ended).get("what", ""))


def cause(status: dict[str, Any]) -> str:
    """`why` of a run's summary; of one that is LOST what its host takes for the cause."""
    return why(status["exit"]) or str(status.get("hint") or "")


def what_next(run: str, ended: Exit | None) -> str:
    """For a run that ended badly."""
    reason = reason_of(ended)
    if reason.get("kind") == "stalled":
        stacks = f"the stacks of its threads end its log: `dflash-ops tail-logs {run} -n 200`"
        samples = samples_by_worker(reason.get("at_work"))
        tried = f"; the samples at work, by worker: {samples}" if samples else ""
        return f"{stacks}; to go on: `dflash-ops resume {run}`{tried}"
    if reason.get("kind") == "disk_full":
        room = f"make room there for {reason.get('path')} (`dflash-ops prune --dry-run` shows what could go)"
        return f"{room}, then `dflash-ops resume {run}`; its log: `dflash-ops tail-logs {run}`"
    if refuses(ended):
        fix = f"{reason['fix']}; " if reason.get("fix") else ""
        return f"{fix}its log: `dflash-ops tail-logs {run}`"
    if reason.get("kind") == "non_finite":
        samples = samples_by_worker((reason.get("record") or {}).get("workers"))
        step, good = reason.get("step"), reason.get("good_checkpoint")
        tried = f"; the samples of step {step}, by worker: {samples}" if samples else ""
        if good is None:
            return f"no checkpoint is from before step {step}: begin anew once the cause is mended{tried}"
        name = PurePosixPath(str(good)).name
        return f"`dflash-ops resume {run}` goes on from {name}, its last checkpoint from before step {step}{tried}"
    return f"its log: `dflash-ops tail-logs {run}`; to go on: `dflash-ops resume {run}`"


def tell_next(events: Events, status: dict[str, Any]) -> None:
    """Event `next` for a run that ended badly, where no error says it. `status`: its summary, as the host gives it.

    Nothing where it went on under another name, or its host is about to start it again: that is told already.
    """
    following = status.get("next") or {}
    if status["state"] in BAD_STATES and not (following.get("run") or following.get("due")):
        events.emit("next", run=status["run"], what=what_next(status["run"], status["exit"]))


def reason_of(ended: Exit | None) -> dict[str, Any]:
    """`reason` of exit.json; empty where there is none."""
    reason = (ended or {}).get("reason")
    return reason if isinstance(reason, dict) else {}


def refuses(ended: Exit | None) -> bool:
    """Whether it ended because its trainer refused its settings or its input."""
    return reason_of(ended).get("kind") == "refused"


def doubtful(checkpoints: Iterable[Path], ended: Exit | None) -> list[Path]:
    """Those (folders here) that were written after the last step whose loss was a number."""
    reason = reason_of(ended)
    if reason.get("kind") != "non_finite":
        return []
    good = reason.get("good_step")
    bound = good if isinstance(good, int) else -1
    return [path for path in checkpoints if _step(path) > bound]


def _step(checkpoint: Path) -> float:
    """Of its manifest; one that does not say is after all others."""
    try:
        step = json.loads((checkpoint / "manifest.json").read_bytes())["step"]
    except (OSError, ValueError, KeyError, TypeError):
        return math.inf
    return step if isinstance(step, int) else math.inf


def samples_by_worker(workers: object) -> str:
    """`0: 12, 7; 1: 3, 9` of the `workers` of a step."""
    if not isinstance(workers, list):
        return ""
    return "; ".join(
        f"{one.get('worker')}: {', '.join(map(str, one['samples']))}"
        for one in workers
        if isinstance(one, dict) and isinstance(one.get("samples"), list)
    )
