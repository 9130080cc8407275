"""A log in generations: written so that it never grows beyond its cap, and read past what was dropped for that."""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import List, Optional

from .files import atomic_write, open_regular, tail_lines

_NAME = re.compile(r"(\d{6,})\.log")
_GAP_SAYS = re.compile(r"dflash-ops: (\d+) bytes of log \(generations 1 to (\d+)\)")
_APPEND = os.O_WRONLY | os.O_APPEND | os.O_CREAT
_TAIL_BYTES = 64 * 1024
_GAP_BYTES = 256
"""Room that is kept for the file that says what was dropped."""


@dataclass(frozen=True)
class LogFolder:
    """`000000.log`, `000001.log`, …: one stream of bytes, cut into files."""

    path: Path

    def file(self, generation: int) -> Path:
        return self.path / f"{generation:06d}.log"

    @property
    def gap_file(self) -> Path:
        """One line that says what was dropped. Its name sorts to that place: after the first file, before the rest."""
        return self.path / "000001-dropped.log"

    def begin(self) -> None:
        """Makes the first file, so that a log is there as soon as its run is."""
        os.close(os.open(self.file(0), _APPEND, 0o600))

    def generations(self) -> List[int]:
        """Those that are there, oldest first."""
        try:
            names = os.listdir(self.path)
        except FileNotFoundError:
            return []
        return sorted(int(match.group(1)) for match in map(_NAME.fullmatch, names) if match)

    def following(self, generation: int) -> Optional[int]:
        """The next one that is there."""
        if self.file(generation + 1).exists():
            return generation + 1
        return next((one for one in self.generations() if one > generation), None)

    def tail(self, count: int = 40) -> List[str]:
        """The last lines, also where they (or one of them) lie in two files; at most 64 KiB."""
        end = b""
        for generation in reversed(self.generations()):
            end = _last_bytes(self.file(generation), _TAIL_BYTES - len(end)) + end
            if len(end) >= _TAIL_BYTES:
                break
        return end.decode("utf-8", "replace").splitlines()[-count:]


def _last_bytes(path: Path, count: int) -> bytes:
    try:
        with open_regular(path) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - count))
            return file.read(count)
    except OSError:
        return b""


class LogWriter:
    """Appends to the newest generation; begins the next one at a line's end once a file has `rotate_bytes`.

    A line without end is cut at twice that. All files together stay within `max_bytes` (so a small cap makes small
    files): the oldest go first, but never generation 0, which tells how the run began. Bytes that the disk does not
    take are counted, and the log says how many were lost as soon as there is room again: `write` never blocks on a
    full disk and never raises for one.
    """

    def __init__(self, folder: LogFolder, rotate_bytes: int, max_bytes: int) -> None:
        self._folder = folder
        self._max = max(max_bytes - _GAP_BYTES, 4)
        self._rotate = max(1, min(rotate_bytes, self._max // 4))
        self._fd: Optional[int] = None
        self._lost, self._why = 0, ""
        self._owed = b""
        self._dropped, self._dropped_to, self._gap_written = 0, 0, True
        self._read_gap()
        self._sizes = {one: folder.file(one).stat().st_size for one in folder.generations()}
        self._current = max(self._sizes, default=0)
        self._sizes.setdefault(self._current, 0)
        self._line_open = self._line_was_open()

    def write(self, data: bytes) -> None:
        taken = self._append(data) if self.settle() else 0
        self._lost += len(data) - taken

    def note(self, text: str) -> None:
        """A line of ours, at this place of the log."""
        self._owed += self._line(text, self._line_open)
        self.settle()

    def settle(self) -> bool:
        """Writes what the log owes its reader (lines of ours); whether nothing is owed any more."""
        if not self._gap_written:
            self._write_gap()
        if self._owed:
            self._owed = self._owed[self._append(self._owed) :]
        if self._lost and not self._owed:
            text = self._line(f"{self._lost} bytes of log were lost here: {self._why}", self._line_open)
            taken = self._append(text)
            if taken:
                self._lost, self._owed = 0, text[taken:]
        return not self._owed and not self._lost

    @staticmethod
    def _line(text: str, line_open: bool) -> bytes:
        start = "\n" if line_open else ""
        return f"{start}dflash-ops: {text}\n".encode()

    def _append(self, data: bytes) -> int:
        """How many bytes the disk took."""
        start = 0
        try:
            while start < len(data):
                fd = self._file()
                end = self._end_for_this_file(data, start)
                self._make_room(end - start)
                written = os.write(fd, data[start:end])
                start += written
                self._sizes[self._current] += written
                self._line_open = data[start - 1 : start] != b"\n"
        except OSError as error:
            self._why = error.strerror or str(error)
        return start

    def _file(self) -> int:
        """The file to write to: the next one when the current is full."""
        if self._fd is None:
            self._fd = self._open(self._current)
        size = self._sizes[self._current]
        if size >= 2 * self._rotate or (size >= self._rotate and not self._line_open):
            fd = self._open(self._current + 1)
            os.close(self._fd)
            self._fd, self._current = fd, self._current + 1
            self._sizes[self._current] = 0
        return self._fd

    def _open(self, generation: int) -> int:
        return os.open(self._folder.file(generation), _APPEND, 0o600)

    def _end_for_this_file(self, data: bytes, start: int) -> int:
        """Up to the line's end at which the file is full, or as much as it may have at most."""
        size = self._sizes[self._current]
        until_full = max(self._rotate - size, 0)
        line_end = data.find(b"\n", start + max(until_full - 1, 0))
        wanted = len(data) if line_end < 0 else line_end + 1
        return min(wanted, start + 2 * self._rotate - size)

    def _make_room(self, count: int) -> None:
        """Drops the oldest generations until `count` more bytes fit below the cap."""
        while sum(self._sizes.values()) + count > self._max:
            victim = next((one for one in sorted(self._sizes) if 0 < one < self._current), None)
            if victim is None:
                return
            self._folder.file(victim).unlink(missing_ok=True)
            self._dropped, self._dropped_to = self._dropped + self._sizes.pop(victim), victim
            self._write_gap()

    def _write_gap(self) -> None:
        text = (
            f"dflash-ops: {self._dropped} bytes of log (generations 1 to {self._dropped_to}) were dropped here: "
            f"a log may have {self._max + _GAP_BYTES} bytes (log_max_bytes)\n"
        )
        self._gap_written = False
        # on a full disk later: the files that were dropped make room
        with contextlib.suppress(OSError):
            atomic_write(self._folder.gap_file, text.encode(), durable=False)
            self._gap_written = True

    def _read_gap(self) -> None:
        said = _GAP_SAYS.match(" ".join(tail_lines(self._folder.gap_file, 1)))
        if said is not None:
            self._dropped, self._dropped_to = int(said.group(1)), int(said.group(2))

    def _line_was_open(self) -> bool:
        """Whether the newest file ends within a line: another writer was killed there."""
        return _last_bytes(self._folder.file(self._current), 1) not in (b"", b"\n")
