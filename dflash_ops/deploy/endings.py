"""How a run ended, in words, and what to type next."""

from __future__ import annotations

from typing import Any

Exit = dict[str, Any]
"""The host's exit.json (docs/agent-protocol.md)."""


def why(ended: Exit | None) -> str:
    """Why its supervisor ended it; empty where it did not. None: the run goes on, or is lost."""
    return str(reason_of(ended).get("what", ""))


def what_next(run: str, ended: Exit | None) -> str:
    """For a run that ended badly."""
    reason = reason_of(ended)
    if reason.get("kind") == "stalled":
        stacks = f"the stacks of its threads end its log: `dflash-ops tail-logs {run} -n 200`"
        return f"{stacks}; to go on: `dflash-ops resume {run}`"
    if reason.get("kind") == "non_finite":
        samples = samples_of(reason.get("record"))
        step = reason.get("step")
        tried = f"; the samples of step {step}, by worker: {samples}" if samples else ""
        return f"take a checkpoint from before step {step} (`dflash-ops collect {run}`){tried}"
    return f"its log: `dflash-ops tail-logs {run}`; to go on: `dflash-ops resume {run}`"


def reason_of(ended: Exit | None) -> dict[str, Any]:
    """`reason` of exit.json; empty where there is none."""
    reason = (ended or {}).get("reason")
    return reason if isinstance(reason, dict) else {}


def samples_of(record: object) -> str:
    """`0: 12, 7; 1: 3, 9` of a `step` record."""
    workers = record.get("workers") if isinstance(record, dict) else None
    if not isinstance(workers, list):
        return ""
    return "; ".join(
        f"{one.get('worker')}: {', '.join(map(str, one['samples']))}"
        for one in workers
        if isinstance(one, dict) and isinstance(one.get("samples"), list)
    )
