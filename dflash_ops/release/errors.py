"""What the build refuses, said once: what, where, and the nearest right thing."""

from __future__ import annotations

from dataclasses import dataclass


class ReleaseError(Exception):
    """A release cannot be built or checked. The command line maps it to exit code 3."""

    def __init__(self, what: str, where: str, fix: str) -> None:
        super().__init__(what, where, fix)
        self.what = what
        self.where = where
        self.fix = fix

    def __str__(self) -> str:
        return f"{self.where}: {self.what}\n  {self.fix}"


@dataclass(frozen=True)
class PatchPlace:
    """Where a patch stopped. `line` counts from 1 in the file that is patched, or in the patch itself where
    the patch is malformed (`in_patch`)."""

    patch: str
    file: str | None = None
    hunk: int | None = None
    line: int | None = None
    in_patch: bool = False

    def __str__(self) -> str:
        parts = [self.patch]
        if self.in_patch and self.line is not None:
            parts[0] += f":{self.line}"
        if self.file is not None:
            parts.append(self.file)
        if self.hunk is not None:
            parts.append(f"hunk {self.hunk}")
        if not self.in_patch and self.line is not None:
            parts.append(f"line {self.line}")
        return ", ".join(parts)


class PatchError(ReleaseError):
    """A diff does not apply exactly, or is not a diff that can be applied.

    `file`, `hunk` (from 1) and `line` (from 1) say where; `expected` is the line that the diff has there and
    `found` the one that the tree has (None: the file ends there).
    """

    def __init__(
        self,
        what: str,
        place: PatchPlace,
        fix: str,
        *,
        expected: str | None = None,
        found: str | None = None,
    ) -> None:
        super().__init__(what, str(place), fix)
        self.patch = place.patch
        self.file = place.file
        self.hunk = place.hunk
        self.line = place.line
        self.expected = expected
        self.found = found
