"""What a `prepare` has done, on disk as it comes, so that one that was killed goes on where it was.

One line of JSON for each piece of work, appended and fsynced: a line is whole, or it is not there. The first line has
the key of the data; what follows the last whole line is cut off when the file is opened again.
"""

from __future__ import annotations

import json
import logging
import os
from array import array
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from trainer.errors import InputError
from trainer.files import fsync_dir

log = logging.getLogger(__name__)


class JournalFile:
    """The lines of one `prepare`; `read` gets those that are there. Raises `InputError` where it is of other data."""

    def __init__(self, path: Path, key: str, read: Callable[[dict[str, Any]], None]) -> None:
        self._path = path
        self._file: BinaryIO = path.open("r+b" if path.exists() else "w+b")
        good = self._read(key, read)
        self._file.truncate(good)
        self._file.seek(good)
        if good == 0:
            self.append({"key": key})
            fsync_dir(path.parent)

    def append(self, value: object) -> None:
        """Keep one line: whole, or where the process dies not at all."""
        self._file.write(json.dumps(value, separators=(",", ":")).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def beat(self) -> None:
        """Give the file the time of now: a `prepare` whose folder does not change is taken for hung."""
        os.utime(self._path)

    def close(self) -> None:
        """Let the file go; it stays."""
        self._file.close()

    def _read(self, key: str, read: Callable[[dict[str, Any]], None]) -> int:
        """Read the whole lines; the offset of their end."""
        good = 0
        for line in self._file:
            value = _whole(line)
            if value is None:
                log.warning("%s is damaged after byte %d: what follows is made again", self._path, good)
                break
            if good == 0:
                self._refuse_other(value, key)
            else:
                read(value)
            good += len(line)
        return good

    def _refuse_other(self, first: dict[str, Any], key: str) -> None:
        if first.get("key") != key:
            raise InputError(
                "it holds what was made with other settings, another target or other prompts",
                str(self._path),
                "give an empty folder for --out, or the settings that it was begun with",
            )


class Journal:
    """The target's answers, by turn and row. Raises `InputError` where the file belongs to other data."""

    def __init__(self, path: Path, key: str) -> None:
        self._answers: dict[int, dict[int, array[int]]] = {}
        self._file = JournalFile(path, key, self._read)

    def of_turn(self, turn: int) -> Mapping[int, Sequence[int]]:
        """Token ids of the answers that are there, by row."""
        return self._answers.get(turn, {})

    def append(self, turn: int, answers: Mapping[int, Sequence[int]]) -> None:
        """Keep some rows' answers: all of them, or where the process dies none."""
        self._file.append({"turn": turn, "rows": list(answers), "answers": [list(each) for each in answers.values()]})
        self._keep(turn, answers)

    def beat(self) -> None:
        """See `JournalFile`."""
        self._file.beat()

    def close(self) -> None:
        """See `JournalFile`."""
        self._file.close()

    def _keep(self, turn: int, answers: Mapping[int, Sequence[int]]) -> None:
        # four bytes a token: a list of Python's integers takes nine times as much
        self._answers.setdefault(turn, {}).update((row, array("i", ids)) for row, ids in answers.items())

    def _read(self, value: dict[str, Any]) -> None:
        self._keep(value["turn"], dict(zip(value["rows"], value["answers"], strict=True)))


def _whole(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) and line.endswith(b"\n") else None
