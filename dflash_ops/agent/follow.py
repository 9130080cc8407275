"""Files that grow, read from a cursor: each byte once, whoever connects when."""

from __future__ import annotations

import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, Optional

from .arguments import Arguments
from .conversation import Conversation
from .files import open_regular
from .frames import LOG_STREAM, METRICS_STREAM
from .runs import RunState, find_run

POLL_S = 0.05
_CHUNK = 256 * 1024


@dataclass(frozen=True)
class Cursor:
    """A place in a stream: `generation` counts its files, `offset` the bytes of that file."""

    generation: int = 0
    offset: int = 0

    @classmethod
    def from_json(cls, args: Arguments) -> "Cursor":
        return cls(args.size("generation", 0), args.size("offset", 0))


@dataclass
class Tail:
    """One stream: `path_of` gives the file of a generation, `moved` is told when the stream goes to another one."""

    path_of: Callable[[int], Path]
    cursor: Cursor = field(default_factory=Cursor)
    moved: Optional[Callable[[Cursor], None]] = None

    def read(self) -> Iterator[bytes]:
        """Everything from the cursor to the present end; the cursor follows as each block is taken."""
        while True:
            yield from self._rest_of_file()
            following = self.path_of(self.cursor.generation + 1)
            if following == self.path_of(self.cursor.generation) or not following.exists():
                return
            # the writer left this file before it made the next one: what it wrote last is read first
            yield from self._rest_of_file()
            self._move(Cursor(self.cursor.generation + 1, 0))

    def _rest_of_file(self) -> Iterator[bytes]:
        try:
            file = open_regular(self.path_of(self.cursor.generation))
        except FileNotFoundError:
            return
        with file:
            if os.fstat(file.fileno()).st_size < self.cursor.offset:
                # cut off or replaced: what is there now is another file to its reader
                self._move(Cursor(self.cursor.generation + 1, 0))
            file.seek(self.cursor.offset)
            while True:
                block = file.read(_CHUNK)
                if not block:
                    return
                self.cursor = Cursor(self.cursor.generation, self.cursor.offset + len(block))
                yield block

    def _move(self, cursor: Cursor) -> None:
        self.cursor = cursor
        if self.moved is not None:
            self.moved(cursor)


def op_follow(conversation: Conversation, args: Arguments) -> Dict[str, Any]:
    folder = find_run(conversation.work, args.optional_run())
    wait = args.flag("wait")
    tails = {
        "log": (LOG_STREAM, folder.log_file),
        "metrics": (METRICS_STREAM, lambda _: folder.metrics),
    }
    cursors = Arguments("follow cursors", args.optional_table("cursors"))
    streams = []
    for name, (number, path_of) in tails.items():
        start = Cursor.from_json(Arguments(f"follow cursors.{name}", cursors.optional_table(name)))

        def moved(cursor: Cursor, name: str = name) -> None:
            conversation.event("generation", stream=name, **asdict(cursor))

        streams.append((name, number, Tail(path_of, start, moved)))
    while True:
        # asked before the files are read: what was written before the end is then read too
        ended = folder.state() is not RunState.RUNNING
        for _, number, tail in streams:
            for block in tail.read():
                conversation.data(block, number)
        if ended or not wait:
            break
        time.sleep(POLL_S)
    return {**folder.summary(), "cursors": {name: asdict(tail.cursor) for name, _, tail in streams}}
