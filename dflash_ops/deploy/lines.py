"""Bytes of a log to lines of text: split anywhere, decoded with replacement, progress bars kept to their last state."""

from __future__ import annotations

import codecs
from collections.abc import Callable

LONGEST = 1 << 20
"""Characters of one line; what is longer comes in pieces, so that a log without line ends fits into memory."""


class LineSplitter:
    """Feed it bytes; it calls `emit` once for each line, without its end."""

    def __init__(self, emit: Callable[[str], None]) -> None:
        self._emit = emit
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._rest: list[str] = []
        self._length = 0

    def feed(self, data: bytes) -> None:
        first, *others = self._decoder.decode(data).split("\n")
        # joined once a line: a line may come in thousands of pieces
        self._hold(first)
        if not others:
            return
        self._end_line()
        *whole, last = others
        for line in whole:
            if len(line) > LONGEST:
                self._hold(line)
                self._end_line()
            else:
                # most of a log that is caught up: nothing is to be joined
                self._emit(_last_state(line) if "\r" in line else line)
        self._hold(last)

    def _end_line(self) -> None:
        self._emit(_last_state("".join(self._rest)))
        self._rest, self._length = [], 0

    def _hold(self, piece: str) -> None:
        self._rest.append(piece)
        self._length += len(piece)
        if self._length <= LONGEST:
            return
        # of a progress bar only the last state counts
        text = "".join(self._rest)
        state = _last_state(text) + ("\r" if text.endswith("\r") else "")
        while len(state) > LONGEST:
            self._emit(state[:LONGEST])
            state = state[LONGEST:]
        self._rest, self._length = [state], len(state)

    def close(self) -> None:
        """The last line may lack its end."""
        rest = "".join(self._rest) + self._decoder.decode(b"", final=True)
        self._rest = []
        if rest:
            self._emit(_last_state(rest))


def _last_state(line: str) -> str:
    return line.rstrip("\r").rsplit("\r", 1)[-1]


def gist(text: str) -> str:
    """One line of a text that may be a whole traceback, whose last line says what happened. The rest is in the log."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""
