"""`python -m tests.regressions.refresh`: moves the patches' hunks to where the trainer's lines are now.

A build applies a patch at exactly its place, so an edit anywhere above it in the same file breaks it. A hunk moves only
to the one place where all its lines stand; where there is none, or more than one, the patch is named and left alone.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from tests.regressions.fault import PATCHES

ROOT = Path(__file__).resolve().parents[2]
_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")


class StaleError(Exception):
    """A hunk has no place, or more than one."""


def refreshed(patch: str, root: Path = ROOT) -> str:
    """The same patch with its hunks where they fit in the files below `root`. Raises StaleError."""
    lines, result = patch.splitlines(keepends=True), []
    content: list[str] = []
    moved = at = 0
    while at < len(lines):
        line = lines[at]
        if line.startswith("--- a/"):
            content = (root / line[6:].strip()).read_text().splitlines(keepends=True)
            moved = 0
        match = _HUNK.match(line)
        at += 1
        if match is None:
            result.append(line)
            continue
        body = []
        old_left, new_left = int(match[2] or 1), int(match[4] or 1)
        while old_left or new_left:
            body.append(lines[at])
            old_left -= lines[at][0] != "+"
            new_left -= lines[at][0] != "-"
            at += 1
        old = [each[1:] for each in body if each[0] != "+"]
        new = [each for each in body if each[0] != "-"]
        start = _place(content, old)
        result.append(f"@@ -{start},{len(old)} +{start + moved},{len(new)} @@\n")
        result += body
        moved += len(new) - len(old)
    return "".join(result)


def _place(content: list[str], old: list[str]) -> int:
    """The number of the line (from 1) where `old` stands."""
    found = [start for start in range(len(content) - len(old) + 1) if content[start : start + len(old)] == old]
    if len(found) != 1:
        raise StaleError(f"{len(found)} places for the hunk with {old[len(old) // 2].strip()!r}")
    return found[0] + 1


def main() -> None:
    """Rewrites what has moved; exits with 1 where a patch must be made anew by hand."""
    stale = 0
    for path in sorted(PATCHES.glob("*.patch")):
        text = path.read_text()
        try:
            fresh = refreshed(text)
        except StaleError as error:
            stale += 1
            print(f"{path.name}: {error}: make it anew")
            continue
        if fresh != text:
            path.write_text(fresh)
            print(f"{path.name}: moved")
    sys.exit(1 if stale else 0)


if __name__ == "__main__":
    main()
