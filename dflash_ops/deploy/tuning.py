"""The table that the trainer's `tune` makes, for the screen and for reports."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard

from dflash_ops.deploy.amounts import sized
from dflash_ops.deploy.lines import gist

COLUMNS = ("strategy", "outcome", "step", "samples/s", "peak memory", "steady after", "")
_LARGEST = 1e18


def rows(table: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """One row of `COLUMNS` for each strategy. A table comes from a host: what is no figure is left empty."""
    strategies = table.get("strategies")
    for row in strategies if isinstance(strategies, list) else []:
        if isinstance(row, dict):
            name = str(row.get("strategy"))
            yield (
                name,
                str(row.get("outcome")).replace("_", " "),
                _figure(row.get("step_ms"), "{:.2f} ms"),
                _figure(row.get("samples_per_s"), "{:.2f}"),
                _size(row.get("peak_bytes")),
                _figure(row.get("warm_up_s"), "{:.1f} s"),
                "the fastest that is right" if name == table.get("fastest") else gist(str(row.get("why") or "")),
            )


def _is_figure(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < _LARGEST


def _figure(value: object, form: str) -> str:
    return form.format(value) if _is_figure(value) else ""


def _size(value: object) -> str:
    return sized(value) if _is_figure(value) else ""
