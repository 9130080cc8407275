"""Bytes of a log to lines of text: split anywhere, decoded with replacement, progress bars kept to their last state."""

from __future__ import annotations

import codecs
from collections.abc import Callable


class LineSplitter:
    """Feed it bytes; it calls `emit` once for each line, without its end."""

    def __init__(self, emit: Callable[[str], None]) -> None:
        self._emit = emit
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._rest: list[str] = []

    def feed(self, data: bytes) -> None:
        first, *others = self._decoder.decode(data).split("\n")
        # joined once a line: a line may come in thousands of pieces
        self._rest.append(first)
        for piece in others:
            self._emit(_last_state("".join(self._rest)))
            self._rest = [piece]

    def close(self) -> None:
        """The last line may lack its end."""
        rest = "".join(self._rest) + self._decoder.decode(b"", final=True)
        self._rest = []
        if rest:
            self._emit(_last_state(rest))


def _last_state(line: str) -> str:
    return line.rstrip("\r").rsplit("\r", 1)[-1]
