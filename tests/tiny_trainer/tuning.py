"""The kept tables of `tune`, and what they make of the strategy `auto`."""

from __future__ import annotations

import hashlib
import json
import platform
from dataclasses import replace
from pathlib import Path
from typing import Any

from .errors import InputError
from .settings import AUTO, STRATEGIES, Settings

SHAPES = (
    "drafter_threads",
    "target_workers",
    "target_gpus",
    "drafter_devices",
    "target_devices",
    "dtype",
    "target_dtype",
    "linear_precision",
    "master_weights",
    "block_size",
    "anchors",
    "buckets",
    "batch_size",
    "accumulation",
    "draft_layers",
    "target_layers",
    "draft_ffn",
    "loss_type",
    "layer_types",
    "sliding_window",
    "sliding_window_origin",
    "sliding_window_non_causal",
)


def shapes(settings: Settings) -> dict[str, Any]:
    """Return what of the workload a table depends on, as it stands in the settings file."""
    values = {name: getattr(settings.workload, name) for name in SHAPES}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def table_key(settings: Settings) -> str:
    """Digest all that a table depends on: never the strategy, nor anything of `training`."""
    parts = {"version": 1, "machine": platform.machine(), "python": platform.python_version(), **shapes(settings)}
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def table_file(settings: Settings) -> Path:
    """Name the kept table of these shapes on this machine."""
    return settings.cache / "tuning" / f"{table_key(settings)}.json"


def kept_table(settings: Settings) -> dict[str, Any] | None:
    """Return the kept table of these shapes on this machine; None where there is none."""
    try:
        table = json.loads(table_file(settings).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return table if isinstance(table, dict) and table.get("fastest") in STRATEGIES else None


def chosen(settings: Settings) -> str | None:
    """Return the strategy that the kept table chooses."""
    table = kept_table(settings)
    return None if table is None else str(table["fastest"])


def needs_tuning(settings: Settings) -> dict[str, str] | None:
    """Return what `check.json` says of it."""
    if settings.workload.strategy != AUTO or chosen(settings) is not None:
        return None
    return {"key": table_key(settings), "why": "no strategy was measured for these shapes on this machine"}


def resolved(settings: Settings) -> Settings:
    """Return settings that name their strategy; `auto` without a table is refused."""
    if settings.workload.strategy != AUTO:
        return settings
    strategy = chosen(settings)
    if strategy is None:
        what = "strategy auto has no table for these shapes on this machine"
        raise InputError(what, "workload.strategy", "run `tune` first, or name a strategy")
    print(f"strategy {strategy}, the fastest right one in {table_file(settings).name}", flush=True)
    return replace(settings, workload=replace(settings.workload, strategy=strategy))
