"""A source tree plus an ordered series of unified diffs becomes a release; and the checks before it ships.

Names are imported on first use: where the answer of the rules is remembered, they need not be.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dflash_ops.release.builder import Release, build
    from dflash_ops.release.checker import check
    from dflash_ops.release.errors import PatchError, ReleaseError
    from dflash_ops.release.finding import Finding, Severity
    from dflash_ops.release.manifest import FileRecord, Manifest, PatchRecord, SourceKind, SourceRecord
    from dflash_ops.release.memory import CheckMemory
    from dflash_ops.release.report import finding_dict, finding_text
    from dflash_ops.release.source import Source, left_out

__all__ = [
    "CheckMemory",
    "FileRecord",
    "Finding",
    "Manifest",
    "PatchError",
    "PatchRecord",
    "Release",
    "ReleaseError",
    "Severity",
    "Source",
    "SourceKind",
    "SourceRecord",
    "build",
    "check",
    "finding_dict",
    "finding_text",
    "left_out",
]

_HOMES = {
    "CheckMemory": "memory",
    "FileRecord": "manifest",
    "Finding": "finding",
    "Manifest": "manifest",
    "PatchError": "errors",
    "PatchRecord": "manifest",
    "Release": "builder",
    "ReleaseError": "errors",
    "Severity": "finding",
    "Source": "source",
    "SourceKind": "manifest",
    "SourceRecord": "manifest",
    "build": "builder",
    "check": "checker",
    "finding_dict": "report",
    "finding_text": "report",
    "left_out": "source",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
