"""The target's answers on disk as they come, so that a `prepare` that was killed goes on where it was.

One line of JSON for each piece of work, appended and fsynced: a line is whole, or it is not there. The first line has
the key of the data; what follows the last whole line is cut off when the file is opened again.
"""

from __future__ import annotations

import json
import logging
import os
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from trainer.errors import InputError
from trainer.files import fsync_dir

log = logging.getLogger(__name__)


class Journal:
    """The answers of one `prepare`, by turn and row. Raises `InputError` where the file belongs to other data."""

    def __init__(self, path: Path, key: str) -> None:
        self._path = path
        self._answers: dict[int, dict[int, array[int]]] = {}
        self._file: BinaryIO = path.open("r+b" if path.exists() else "w+b")
        good = self._read(key)
        self._file.truncate(good)
        self._file.seek(good)
        if good == 0:
            self._write({"key": key})
            fsync_dir(path.parent)

    def of_turn(self, turn: int) -> Mapping[int, Sequence[int]]:
        """Token ids of the answers that are there, by row."""
        return self._answers.get(turn, {})

    def append(self, turn: int, answers: Mapping[int, Sequence[int]]) -> None:
        """Keep some rows' answers: all of them, or where the process dies none."""
        self._write({"turn": turn, "rows": list(answers), "answers": [list(each) for each in answers.values()]})
        self._keep(turn, answers)

    def close(self) -> None:
        """Let the file go; it stays."""
        self._file.close()

    def remove(self) -> None:
        """Delete the file: what it was for is written."""
        self.close()
        self._path.unlink()
        fsync_dir(self._path.parent)

    def _write(self, value: object) -> None:
        self._file.write(json.dumps(value, separators=(",", ":")).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def _keep(self, turn: int, answers: Mapping[int, Sequence[int]]) -> None:
        # four bytes a token: a list of Python's integers takes nine times as much
        self._answers.setdefault(turn, {}).update((row, array("i", ids)) for row, ids in answers.items())

    def _read(self, key: str) -> int:
        """Read the whole lines; the offset of their end."""
        good = 0
        for line in self._file:
            value = _whole(line)
            if value is None:
                log.warning("%s is damaged after byte %d: the answers from there on are made again", self._path, good)
                break
            if good == 0:
                self._refuse_other(value, key)
            else:
                self._keep(value["turn"], dict(zip(value["rows"], value["answers"], strict=True)))
            good += len(line)
        return good

    def _refuse_other(self, first: dict[str, Any], key: str) -> None:
        if first.get("key") != key:
            raise InputError(
                "it holds answers that were made with other settings, another target or other prompts",
                str(self._path),
                "give an empty folder for --out, or the settings that it was begun with",
            )


def _whole(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) and line.endswith(b"\n") else None
