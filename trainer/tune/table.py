"""The kept tables: which strategy is the fastest right one on these devices, this torch and these shapes.

A table lies in `settings.cache/tuning/<key>.json`. Neither the key nor the table depends on anything of `training`.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import torch

from trainer.assets import resolve_asset
from trainer.compile import STRATEGIES
from trainer.drafter_config import DrafterConfig
from trainer.errors import InputError
from trainer.facts import target_facts
from trainer.machine import device_name
from trainer.parts import available_cpus
from trainer.placement import Placement, place
from trainer.settings import AUTO, Settings
from trainer.target_files import target_folder

# raise it when a strategy computes in another way: tables that were kept before are then worth nothing
_VERSION = 1
_SHAPES = (
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
_TIE = 1.02
"""Step times that are nearer than this are equal: then memory decides."""

log = logging.getLogger(__name__)

Found = Literal["right", "wrong", "failed", "not_available"]


@dataclass(frozen=True)
class Row:
    """One strategy. `why` is None, and the figures are there, only where it is `right`.

    `step_ms`: median of a steady optimiser step; `peak_bytes`: of the fullest GPU, None without one; `warm_up_s`:
    seconds of building, compiling and capturing, with compiled kernels in the cache.
    """

    strategy: str
    outcome: Found
    why: str | None = None
    step_ms: float | None = None
    samples_per_s: float | None = None
    peak_bytes: int | None = None
    warm_up_s: float | None = None

    def to_json(self) -> dict[str, Any]:
        """As docs/trainer-contract.md has it."""
        return asdict(self)


def fastest(rows: Sequence[Row]) -> str | None:
    """The right one with the shortest step; of those within 2% of it the one that takes the least memory."""
    right = [(row.step_ms, row) for row in rows if row.outcome == "right" and row.step_ms is not None]
    if not right:
        return None
    best = min(step_ms for step_ms, _ in right)
    close = [(row.peak_bytes or 0, step_ms, row) for step_ms, row in right if step_ms <= best * _TIE]
    return min(close, key=lambda each: each[:2])[2].strategy


def shapes(settings: Settings) -> dict[str, Any]:
    """What of the workload a table depends on, as it stands in a settings file."""
    values = {name: getattr(settings.workload, name) for name in _SHAPES}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def table_key(settings: Settings, drafter: DrafterConfig) -> str:
    """Hex digest of devices, torch and shapes. Raises `InputError` where the devices are not there."""
    parts = {
        "version": _VERSION,
        "torch": torch.__version__,
        "devices": _devices(place(settings.workload, torch.cuda.device_count())),
        "shapes": shapes(settings),
        "drafter": asdict(drafter),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _devices(placement: Placement) -> list[dict[str, Any]]:
    """Each device that is used: its name and how many threads it has."""
    drafters, targets = Counter(placement.drafters), Counter(chain(*placement.target_groups))
    used = sorted({*drafters, *targets}, key=str)
    return [
        {
            "name": device_name(device),
            "drafters": drafters[device],
            "targets": targets[device],
            "cpus": available_cpus() if device.type == "cpu" else None,
        }
        for device in used
    ]


def table_path(settings: Settings, key: str) -> Path:
    """Where the table of that key is kept."""
    return settings.cache / "tuning" / f"{key}.json"


def kept_table(settings: Settings, key: str) -> dict[str, Any] | None:
    """The table of that key; None where there is none, or none that names a strategy of this trainer."""
    try:
        table = json.loads(table_path(settings, key).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return table if isinstance(table, dict) and table.get("fastest") in STRATEGIES else None


def needs_tuning(settings: Settings, drafter: DrafterConfig) -> dict[str, str] | None:
    """What `check.json` says of it; None where a strategy is named, or a table is kept. Raises `InputError`."""
    if settings.workload.strategy != AUTO:
        return None
    key = table_key(settings, drafter)
    if kept_table(settings, key) is not None:
        return None
    placement = place(settings.workload, torch.cuda.device_count())
    where = ", ".join(sorted({device_name(device) for device in placement.drafters}))
    why = f"strategy auto: none was measured on {where} with torch {torch.__version__} for these shapes and threads"
    return {"key": key, "why": why}


@dataclass(frozen=True)
class Choice:
    """`settings` name a strategy; `table` is the kept one of these devices, torch and shapes, if there is one."""

    settings: Settings
    table: dict[str, Any] | None


def choose(settings: Settings) -> Choice:
    """Settings whose strategy is named: by them, or where they say `auto` by the kept table. Raises `InputError`."""
    if settings.workload.strategy != AUTO and not (settings.cache / "tuning").is_dir():
        return Choice(settings, None)
    # a GGUF file is converted first: its small files load much faster from there
    target_folder(resolve_asset(settings.workload.target, "workload.target"), settings.cache)
    key = table_key(settings, target_facts(settings).drafter)
    table = kept_table(settings, key)
    if settings.workload.strategy != AUTO:
        return Choice(settings, table)
    if table is None:
        raise InputError(
            "strategy auto has no table for these devices, this torch and these shapes",
            "workload.strategy",
            "measure them (`python -m trainer tune`, or dflash-ops canary --tune), or name a strategy",
        )
    strategy = str(table["fastest"])
    log.info("strategy %s: the fastest right one in %s", strategy, table_path(settings, key))
    return Choice(replace(settings, workload=replace(settings.workload, strategy=strategy)), table)


def named(settings: Settings) -> Settings:
    """As `choose`, for who has no use for the table."""
    return settings if settings.workload.strategy != AUTO else choose(settings).settings
