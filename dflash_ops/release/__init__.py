"""A source tree plus an ordered series of unified diffs becomes a release; and the checks before it ships."""

from dflash_ops.release.builder import Release, build
from dflash_ops.release.checker import check
from dflash_ops.release.errors import PatchError, ReleaseError
from dflash_ops.release.finding import Finding, Severity
from dflash_ops.release.manifest import FileRecord, Manifest, PatchRecord, SourceKind, SourceRecord
from dflash_ops.release.report import finding_dict, finding_text
from dflash_ops.release.source import Source

__all__ = [
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
]
