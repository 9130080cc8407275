"""Reads unified diffs: plain ones, and git's with its extended headers.

The grammar is the one of `git help diff-format` ("Generating patch text with -p") and of POSIX diff -u; hunks
are read by the counts of their headers, so a hunk that was cut or padded by hand is an error, not a guess.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from dflash_ops.release.diff_names import BadNameError, Names, git_names, plain_names, release_path, side_name
from dflash_ops.release.errors import PatchError, PatchPlace

_HUNK = re.compile(rb"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_MODES = {b"100644": 0o644, b"100755": 0o755}
_REGENERATE = "make the patch again from the tree: git diff > NAME.patch"


class Change(str, Enum):
    MODIFY = "modify"
    CREATE = "create"
    DELETE = "delete"
    RENAME = "rename"
    COPY = "copy"


@dataclass(frozen=True)
class Hunk:
    """`old` and `new` are lines with their line ends; the last of a file may have none. `start` is the index
    (from 0) of the first old line. `leading` and `trailing` count the lines of context at both ends."""

    number: int
    start: int
    old: tuple[bytes, ...]
    new: tuple[bytes, ...]
    leading: int
    trailing: int


@dataclass(frozen=True)
class FileDiff:
    """The change of one file. `old` and `new` are paths inside the release; they differ only in a rename or a
    copy. Modes are None where the diff does not speak of them. `line` is where it begins in the patch."""

    change: Change
    old: str
    new: str
    old_mode: int | None
    new_mode: int | None
    hunks: tuple[Hunk, ...]
    line: int


def parse(data: bytes, patch: str) -> list[FileDiff]:
    """All file changes of a patch, in its order. Text before and between them (a commit message) is skipped.

    Raises PatchError where the patch is binary, combined, changes a link or a submodule, is malformed, or
    holds no change at all.
    """
    return _Parser(data, patch).parse()


@dataclass
class _Header:
    """What git's extended header lines said."""

    line: int
    rest: bytes
    change: Change = Change.MODIFY
    old: bytes | None = None
    new: bytes | None = None
    old_mode: int | None = None
    new_mode: int | None = None


class _Parser:
    def __init__(self, data: bytes, patch: str) -> None:
        self.lines = re.findall(rb"[^\n]*\n|[^\n]+", data)
        self.patch = patch
        self.at = 0

    def parse(self) -> list[FileDiff]:
        diffs: list[FileDiff] = []
        while self.at < len(self.lines):
            line = self._header_line()
            if line.startswith(b"diff --git "):
                diffs.append(self._git())
            elif line.startswith((b"diff --cc ", b"diff --combined ")):
                raise self._error("is a combined diff of a merge", "make it against one parent: git diff PARENT")
            elif line.startswith(b"Binary files ") and line.endswith(b" differ"):
                raise self._binary(None)
            elif line.startswith(b"--- ") and self._header_line(1).startswith(b"+++ "):
                diffs.append(self._plain())
            elif line.startswith(b"@@ -"):
                raise self._error("a hunk without the --- and +++ lines before it", _REGENERATE)
            else:
                self.at += 1
        if not diffs:
            self.at = 0
            raise self._error("holds no diff", _REGENERATE)
        return diffs

    def _header_line(self, ahead: int = 0) -> bytes:
        index = self.at + ahead
        return self.lines[index].rstrip(b"\r\n") if index < len(self.lines) else b""

    def _error(self, what: str, fix: str, file: str | None = None, hunk: int | None = None) -> PatchError:
        return PatchError(what, PatchPlace(self.patch, file, hunk, self.at + 1, in_patch=True), fix)

    def _binary(self, file: str | None) -> PatchError:
        return self._error(
            "changes a binary file; only text can be patched", "put the changed file into the source tree", file
        )

    def _git(self) -> FileDiff:
        header = _Header(self.at + 1, self._header_line()[len(b"diff --git ") :])
        self.at += 1
        while self._extended(header):
            self.at += 1
        hunks: tuple[Hunk, ...] = ()
        try:
            names = git_names(header.rest, header.old, header.new)
            if self._header_line().startswith(b"--- "):
                self._agree(header, names)
                self.at += 2
                hunks = self._hunks(names.new)
        except BadNameError as error:
            raise self._bad_name(error) from error
        if header.change is Change.MODIFY and not hunks and header.old_mode == header.new_mode:
            raise self._error("changes nothing: its hunks are lost", _REGENERATE, names.new)
        return FileDiff(header.change, names.old, names.new, header.old_mode, header.new_mode, hunks, header.line)

    def _agree(self, header: _Header, names: Names) -> None:
        """Raises BadNameError unless the --- and +++ lines say what git's header lines said."""
        old, new = self._sides()
        change = _change(old, new)
        if header.change in {Change.RENAME, Change.COPY} and change is Change.MODIFY:
            change = header.change
        told_old = names.old if old is None else release_path(old, names.prefixes[0])
        told_new = names.new if new is None else release_path(new, names.prefixes[1])
        if change is not header.change or (told_old, told_new) != (names.old, names.new):
            raise BadNameError("its `diff --git` header and its --- and +++ lines do not agree")

    def _extended(self, header: _Header) -> bool:
        """Takes one extended header line; False when the line is something else."""
        line = self._header_line()
        key, _, value = line.partition(b" ")
        if line.startswith((b"GIT binary patch", b"Binary files ")):
            raise self._binary(self._told_name(header))
        if line.startswith(b"old mode "):
            header.old_mode = self._mode(line, header)
        elif line.startswith(b"new mode "):
            header.new_mode = self._mode(line, header)
        elif line.startswith(b"new file mode "):
            header.change, header.new_mode = Change.CREATE, self._mode(line, header)
        elif line.startswith(b"deleted file mode "):
            header.change, header.old_mode = Change.DELETE, self._mode(line, header)
        elif key in {b"rename", b"copy"} and value.startswith((b"from ", b"to ")):
            header.change = Change.RENAME if key == b"rename" else Change.COPY
            side, _, name = value.partition(b" ")
            if side == b"from":
                header.old = name
            else:
                header.new = name
        elif key == b"index":
            self._mode(line, header, index=True)
        else:
            return key in {b"similarity", b"dissimilarity"}
        return True

    def _mode(self, line: bytes, header: _Header, *, index: bool = False) -> int | None:
        value = line.split()[-1]
        if value in _MODES:
            return _MODES[value]
        if index and len(line.split()) < 3:  # `index OLD..NEW` names a mode only where it stays
            return None
        kinds = {b"120000": "a symbolic link", b"160000": "a submodule"}
        kind = kinds.get(value, f"a file of mode {value.decode('ascii', 'replace')}")
        raise self._error(
            f"changes {kind}; a release holds plain files only",
            "take that file out of the patch",
            self._told_name(header),
        )

    def _told_name(self, header: _Header) -> str | None:
        try:
            return git_names(header.rest, header.old, header.new).new
        except BadNameError:
            return None

    def _plain(self) -> FileDiff:
        line = self.at + 1
        try:
            old, new = self._sides()
            names = plain_names(old, new)
        except BadNameError as error:
            raise self._bad_name(error) from error
        self.at += 2
        return FileDiff(_change(old, new), names.old, names.new, None, None, self._hunks(names.new), line)

    def _sides(self) -> tuple[bytes | None, bytes | None]:
        new_line = self._header_line(1)
        if not new_line.startswith(b"+++ "):
            raise self._error("a --- line without a +++ line after it", _REGENERATE)
        return side_name(self._header_line()[4:]), side_name(new_line[4:])

    def _bad_name(self, error: BadNameError) -> PatchError:
        return self._error(str(error), "write paths relative to the release's root: a/PATH and b/PATH")

    def _hunks(self, file: str) -> tuple[Hunk, ...]:
        hunks: list[Hunk] = []
        while self._header_line().startswith(b"@@ "):
            hunks.append(self._hunk(file, len(hunks) + 1))
        line = self.lines[self.at] if self.at < len(self.lines) else b""
        # "-- " begins the signature of git format-patch
        over = line[:1] in {b" ", b"+", b"-"} and line.rstrip(b"\r\n") != b"-- "
        if over and not (line.startswith(b"--- ") and self._header_line(1).startswith(b"+++ ")):
            what = "has more lines than its @@ line says" if hunks else "a hunk without an @@ line"
            raise self._error(what, _REGENERATE, file, len(hunks) or 1)
        if not hunks:
            raise self._error("--- and +++ lines without a hunk", _REGENERATE, file)
        return tuple(hunks)

    def _hunk(self, file: str, number: int) -> Hunk:
        match = _HUNK.match(self._header_line())
        if match is None:
            raise self._error("malformed @@ line", _REGENERATE, file, number)
        start = int(match[1])
        old_left, new_left = int(match[2] or 1), int(match[4] or 1)
        # a hunk without old lines stands *after* line `start`
        first = start - 1 if old_left else start
        if first < 0:
            raise self._error("malformed @@ line: lines count from 1", _REGENERATE, file, number)
        self.at += 1
        old: list[bytes] = []
        new: list[bytes] = []
        marks: list[bytes] = []
        while old_left or new_left or self._header_line().startswith(b"\\"):
            line = self.lines[self.at] if self.at < len(self.lines) else b""
            mark, text = line[:1], line[1:]
            if line in {b"\n", b"\r\n"}:  # editors strip the blank of an empty context line
                mark, text = b" ", line
            if mark == b"\\":
                self._no_line_end(old, new, marks, file, number)
            elif mark not in {b" ", b"-", b"+"}:
                raise self._error("has fewer lines than its @@ line says", _REGENERATE, file, number)
            else:
                for side, taken in ((old, mark != b"+"), (new, mark != b"-")):
                    if taken and side and not side[-1].endswith(b"\n"):
                        raise self._error("a line after the end of the file", _REGENERATE, file, number)
                    if taken:
                        # a patch file may itself lack its last line end: only "\ No newline" speaks of the file
                        side.append(text if text.endswith(b"\n") else text + b"\n")
                marks.append(mark)
                old_left -= mark != b"+"
                new_left -= mark != b"-"
                if old_left < 0 or new_left < 0:
                    raise self._error("does not add up to its @@ line", _REGENERATE, file, number)
            self.at += 1
        changed = [index for index, mark in enumerate(marks) if mark != b" "]
        leading = changed[0] if changed else len(marks)
        trailing = len(marks) - 1 - changed[-1] if changed else len(marks)
        return Hunk(number, first, tuple(old), tuple(new), leading, trailing)

    def _no_line_end(self, old: list[bytes], new: list[bytes], marks: list[bytes], file: str, number: int) -> None:
        """`\\ No newline at end of file` speaks of the line before it."""
        if not marks:
            raise self._error("`\\ No newline` before any line", _REGENERATE, file, number)
        for side, told in ((old, marks[-1] != b"+"), (new, marks[-1] != b"-")):
            if told:
                side[-1] = side[-1].removesuffix(b"\n")


def _change(old: bytes | None, new: bytes | None) -> Change:
    if old is None:
        return Change.CREATE
    return Change.DELETE if new is None else Change.MODIFY
