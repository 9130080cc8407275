"""Amounts as a person reads them."""

from __future__ import annotations


def sized(count: float) -> str:
    """`908 B`, `16.4 GiB`"""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def number(count: int, thing: str, things: str | None = None) -> str:
    """`1 file`, `2 files`"""
    return f"{count} {thing if count == 1 else things or thing + 's'}"
