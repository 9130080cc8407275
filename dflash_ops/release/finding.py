"""What a static check says about one line."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Severity(str, Enum):
    ERROR = "error"  # stops the build
    WARNING = "warning"


@dataclass(frozen=True)
class Finding:
    """`path` is relative to the release's root, `line` counts from 1 (0: the whole file). `suppressed` is the
    reason in the line's `# dflash: allow[...]` comment, or None."""

    rule: str
    severity: Severity
    path: str
    line: int
    why: str
    fix: str
    suppressed: str | None = None

    @property
    def blocks(self) -> bool:
        """Whether the release must not be staged."""
        return self.severity is Severity.ERROR and self.suppressed is None
