"""Applies a patch exactly: no fuzz, no offset, no whitespace tolerance."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping

from dflash_ops.release.diff import Change, FileDiff, Hunk, parse
from dflash_ops.release.errors import PatchError, PatchPlace
from dflash_ops.release.manifest import TreeFile

_REGENERATE = "make the patch again from this source tree"


def apply_patch(tree: Mapping[str, TreeFile], data: bytes, patch: str) -> dict[str, TreeFile]:
    """The tree (by path inside the release) after the patch; the argument stays as it is.

    Raises PatchError with the file, hunk and line where a hunk does not match at exactly its place, a file is
    missing or in the way, or the patch is none that can be applied.
    """
    result = dict(tree)
    for diff in parse(data, patch):
        _apply_file(result, tree, diff, patch)
    _refuse_file_and_folder(result, patch)
    return result


def _apply_file(tree: dict[str, TreeFile], before: Mapping[str, TreeFile], diff: FileDiff, patch: str) -> None:
    """Changes `tree`; `before` is the tree as it was before the whole patch."""

    def refuse(what: str, file: str, fix: str) -> PatchError:
        return PatchError(what, PatchPlace(patch, file, line=diff.line, in_patch=True), fix)

    if diff.change is Change.CREATE:
        old = TreeFile(b"", 0o644)
    elif diff.change is Change.COPY and diff.old in before:
        # git's copies are of what was there before, whatever the same patch does to the file itself
        old = before[diff.old]
    elif diff.old in tree:
        old = tree[diff.old]
        if diff.old_mode not in {None, old.mode}:
            raise refuse(f"has mode {old.mode:04o}; the patch expects {diff.old_mode:04o}", diff.old, _REGENERATE)
    else:
        raise refuse("is not in the tree", diff.old, _nearest(tree, diff.old))
    content = _apply_hunks(old.data, diff, patch)
    if diff.change is Change.DELETE:
        if content:
            raise refuse("would be deleted, but the patch does not hold all of it", diff.old, _REGENERATE)
        del tree[diff.old]
        return
    if diff.change is not Change.MODIFY and diff.new in tree:
        raise refuse(
            "the patch would make it, but it is there already",
            diff.new,
            "take that part out of the patch, or the file out of the source tree",
        )
    if diff.change is Change.RENAME:
        del tree[diff.old]
    tree[diff.new] = TreeFile(content, old.mode if diff.new_mode is None else diff.new_mode)


def _refuse_file_and_folder(tree: Mapping[str, TreeFile], patch: str) -> None:
    """Asked at the end: git's diffs make `b` before they delete `b/x`."""
    for path in tree:
        for match in re.finditer("/", path):
            if path[: match.start()] in tree:
                raise PatchError(
                    f"{path[: match.start()]} would be a file and a folder", PatchPlace(patch, path), _REGENERATE
                )


def _nearest(tree: Mapping[str, TreeFile], path: str) -> str:
    inside = [other for other in tree if other.endswith(f"/{path}")]
    close = inside or difflib.get_close_matches(path, tree, n=1, cutoff=0.7)
    if len(close) == 1:
        return f"did you mean {close[0]}? Paths are relative to the release's root"
    return "write paths relative to the release's root, and patch files that are in it"


def _apply_hunks(data: bytes, diff: FileDiff, patch: str) -> bytes:
    lines = re.findall(rb"[^\n]*\n|[^\n]+", data)
    result: list[bytes] = []
    done = 0
    for hunk in diff.hunks:
        place = PatchPlace(patch, diff.old, hunk.number, hunk.start + 1)
        if hunk.start < done:
            raise PatchError("overlaps the hunk before it, or stands before it", place, _REGENERATE)
        _match(lines, hunk, place)
        result += lines[done : hunk.start]
        result += hunk.new
        done = hunk.start + len(hunk.old)
        ends = done == len(lines)
        if hunk.leading and not hunk.trailing and not ends:
            # with context before but none behind, the diff says that the file ends there
            raise _mismatch(lines, hunk, place, len(hunk.old))
        if hunk.new and not hunk.new[-1].endswith(b"\n") and not ends:
            raise PatchError(
                "leaves the file's last line without a line end, but stands before other lines",
                place,
                _REGENERATE,
            )
    result += lines[done:]
    if any(not line.endswith(b"\n") for line in result[:-1]):
        place = PatchPlace(patch, diff.old, diff.hunks[-1].number, len(lines))
        raise PatchError("adds lines behind a last line that has no line end", place, _REGENERATE)
    return b"".join(result)


def _match(lines: list[bytes], hunk: Hunk, place: PatchPlace) -> None:
    if hunk.start > len(lines):
        raise PatchError(f"adds lines after line {hunk.start}, but the file has {len(lines)}", place, _REGENERATE)
    for offset, expected in enumerate(hunk.old):
        index = hunk.start + offset
        if index >= len(lines) or lines[index] != expected:
            raise _mismatch(lines, hunk, place, offset)


def _mismatch(lines: list[bytes], hunk: Hunk, place: PatchPlace, offset: int) -> PatchError:
    index = hunk.start + offset
    expected = _text(hunk.old[offset]) if offset < len(hunk.old) else None
    found = _text(lines[index]) if index < len(lines) else None
    what = (
        f"does not match: expected {'the end of the file' if expected is None else repr(expected)}, "
        f"found {'the end of the file' if found is None else repr(found)}"
    )
    at = PatchPlace(place.patch, place.file, place.hunk, index + 1)
    return PatchError(what, at, _advice(lines, hunk, expected, found), expected=expected, found=found)


def _advice(lines: list[bytes], hunk: Hunk, expected: str | None, found: str | None) -> str:
    if expected is not None and found is not None and expected.rstrip("\r\n") == found.rstrip("\r\n"):
        return "the lines differ in their line end only (CRLF, or none at the end of the file): keep it in the patch"
    if hunk.new and _fits(lines, hunk.new, hunk.start):
        return "the file has the new lines there already: is the patch applied in the source tree?"
    fits = (
        [start + 1 for start in range(len(lines) - len(hunk.old) + 1) if _fits(lines, hunk.old, start)]
        if hunk.old
        else []
    )
    if fits:
        more = f" (and at {len(fits) - 1} more)" if len(fits) > 1 else ""
        return f"it would fit at line {fits[0]}{more}; {_REGENERATE}"
    return f"it fits nowhere in this file; {_REGENERATE}"


def _fits(lines: list[bytes], wanted: tuple[bytes, ...], start: int) -> bool:
    return tuple(lines[start : start + len(wanted)]) == wanted


def _text(line: bytes) -> str:
    return line.decode("utf-8", "replace")
