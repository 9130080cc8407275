"""Moments as a person reads them: hosts and workstations may lie in different time zones, so always UTC."""

from __future__ import annotations

from datetime import datetime, timezone


def utc(seconds: float | None) -> str:
    """`2026-11-29 16:56:39 UTC` of Unix seconds; empty for None."""
    if seconds is None:
        return ""
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
