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
from .runs import RunFolder, find_run

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
    """One stream: `path_of` gives the file of a generation, `following` the generation after it, if there is one.

    `moved` is told when the stream goes to another one, with what was dropped before it could be read, in words.
    """

    path_of: Callable[[int], Path]
    cursor: Cursor = field(default_factory=Cursor)
    moved: Optional[Callable[[Cursor, Optional[str]], None]] = None
    following: Callable[[int], Optional[int]] = lambda _: None

    def read(self) -> Iterator[bytes]:
        """Everything from the cursor to the present end; the cursor follows as each block is taken."""
        while True:
            yield from self._rest_of_file()
            following = self.following(self.cursor.generation)
            if following is None:
                return
            # the writer left this file before it made the next one: what it wrote last is read first
            yield from self._rest_of_file()
            self._move(Cursor(following, 0), self._skipped(following))

    def _skipped(self, following: int) -> Optional[str]:
        """What a reader at the cursor does not get because it was dropped, in words."""
        first, offset = self.cursor.generation, self.cursor.offset
        if self.path_of(first).exists():
            first, offset = first + 1, 0
        if first == following:
            return None
        return f"the log from byte {offset} of generation {first} up to generation {following} was dropped on the host"

    def _rest_of_file(self) -> Iterator[bytes]:
        try:
            file = open_regular(self.path_of(self.cursor.generation))
        except FileNotFoundError:
            return
        with file:
            if os.fstat(file.fileno()).st_size < self.cursor.offset:
                # cut off or replaced: what is there now is another file to its reader
                self._move(Cursor(self.cursor.generation + 1, 0), None)
            file.seek(self.cursor.offset)
            while True:
                block = file.read(_CHUNK)
                if not block:
                    return
                self.cursor = Cursor(self.cursor.generation, self.cursor.offset + len(block))
                yield block

    def _move(self, cursor: Cursor, skipped: Optional[str]) -> None:
        self.cursor = cursor
        if self.moved is not None:
            self.moved(cursor, skipped)


def tell_if_it_waits(conversation: Conversation, folder: RunFolder) -> bool:
    """Event `starts_again` where the run waits for that; whether it was told."""
    if not folder.starts_again:
        return False
    found = folder.successor()
    if found is not None:
        conversation.event("starts_again", run=folder.run, state=folder.state().value, due=found.due, left=found.left)
    return True


def tell_of_disk(conversation: Conversation, folder: RunFolder) -> bool:
    """Event `disk_low` where its supervisor warned of a full disk; whether it was told."""
    found = folder.disk_low()
    if found is None:
        return False
    conversation.event("disk_low", run=folder.run, what=found.get("what"))
    return True


def op_follow(conversation: Conversation, args: Arguments) -> Dict[str, Any]:
    folder = find_run(conversation.work, args.optional_run())
    wait = args.flag("wait")
    log = folder.log
    cursors = Arguments("follow cursors", args.optional_table("cursors"))

    def start(name: str) -> Cursor:
        return Cursor.from_json(Arguments(f"follow cursors.{name}", cursors.optional_table(name)))

    def teller(name: str) -> "Callable[[Cursor, Optional[str]], None]":
        def moved(cursor: Cursor, skipped: Optional[str]) -> None:
            conversation.event("generation", stream=name, **asdict(cursor), skipped=skipped)

        return moved

    streams = (
        ("log", LOG_STREAM, Tail(log.file, start("log"), teller("log"), log.following)),
        ("metrics", METRICS_STREAM, Tail(lambda _: folder.metrics, start("metrics"), teller("metrics"))),
    )
    told = warned = False
    while True:
        # asked before the files are read: what was written before the end is then read too
        ended = not folder.goes_on
        for _, number, tail in streams:
            for block in tail.read():
                conversation.data(block, number)
        warned = warned or tell_of_disk(conversation, folder)
        if ended or not wait:
            break
        told = told or tell_if_it_waits(conversation, folder)
        time.sleep(POLL_S)
    return {**folder.summary(), "cursors": {name: asdict(tail.cursor) for name, _, tail in streams}}
