"""Large files of known size and hash: in pieces, over several conversations at once, resumed where they broke off."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from dflash_ops.errors import OpsError, TransportError
from dflash_ops.files import sync_folder, writing
from dflash_ops.transport import Conversation

PIECE_BYTES = 32 << 20
"""One request. Long enough that a round trip between two does not count, short enough to spread one file."""
STREAM_BYTES = 32 << 20
"""A further conversation is opened for each of these: over pct each costs a `pct exec`."""
STOP_PATIENCE_S = 2.0
"""For each thread, when the command is interrupted."""

Span = tuple[int, int]
"""First byte, and the one after the last."""


class Source(Protocol):
    """A host that is being worked with (`Session`)."""

    @property
    def streams(self) -> int:
        """Conversations that are worth having at once, the first one counted."""

    def conversation(self) -> AbstractContextManager[Conversation]: ...


@dataclass(frozen=True)
class Item:
    """A file of the run: `remote` on the host, `target` here once it is whole and verified."""

    remote: str
    size: int
    sha256: str
    target: Path


class Part:
    """`<target>.part`, written anywhere in any order; `<target>.map` says which bytes are there."""

    def __init__(self, item: Item) -> None:
        self.item = item
        self._path = item.target.with_name(f"{item.target.name}.part")
        self._map = item.target.with_name(f"{item.target.name}.map")
        self._lock = threading.Lock()
        self._closed = False
        item.target.parent.mkdir(parents=True, exist_ok=True)
        self._have = self._recorded()
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        if not self._have:
            os.ftruncate(self._file, 0)

    def _recorded(self) -> list[Span]:
        """What an earlier attempt at the same content left."""
        try:
            kept = json.loads(self._map.read_bytes())
            same = kept["sha256"] == self.item.sha256 and kept["size"] == self.item.size and self._path.exists()
            return [(int(start), int(end)) for start, end in kept["have"]] if same else []
        except (OSError, ValueError, KeyError, TypeError, OverflowError):
            return []

    @property
    def missing(self) -> list[Span]:
        """In pieces of at most PIECE_BYTES."""
        spans, at = [], 0
        for start, end in [*self._have, (self.item.size, self.item.size)]:
            spans += [(first, min(first + PIECE_BYTES, start)) for first in range(at, start, PIECE_BYTES)]
            at = max(at, end)
        return spans

    def write(self, offset: int, data: bytes) -> None:
        view = memoryview(data)
        with self._lock:
            if self._closed:
                raise TransportError("nobody waits for these bytes any more", kind="interrupted")
            with writing(self.item.target, self.item.size):
                while view:
                    count = os.pwrite(self._file, view, offset)
                    view, offset = view[count:], offset + count

    def note(self, span: Span) -> None:
        """These bytes are there. Not made durable: a wrong map after a power cut is found by the hash."""
        with self._lock:
            merged: list[Span] = []
            for start, end in sorted([*self._have, span]):
                if merged and start <= merged[-1][1]:
                    merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
                else:
                    merged.append((start, end))
            self._have = merged
            record = {"size": self.item.size, "sha256": self.item.sha256, "have": merged}
            # on a full disk these bytes are brought once more, later
            with contextlib.suppress(OSError):
                temporary = self._map.with_name(f"{self._map.name}.tmp")
                temporary.write_text(json.dumps(record))
                temporary.replace(self._map)

    def finish(self) -> None:
        """Gives it its name; TransportError `verify` (and nothing is left) when the bytes are not the host's."""
        with writing(self.item.target, self.item.size):
            os.fsync(self._file)
        damaged = sha256_of(self._path) != self.item.sha256
        self._map.unlink(missing_ok=True)
        if damaged:
            self._path.unlink()
            raise TransportError(
                f"{self.item.remote} arrived damaged and was thrown away",
                kind="verify",
                fix="run the same command again",
            )
        self._path.replace(self.item.target)
        sync_folder(self.item.target.parent)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            os.close(self._file)


def fetch(conversation: Conversation, source: Source, run: str, items: Sequence[Item]) -> int:
    """Brings all of `items` over `conversation`, and over more of `source` where there is enough to bring.

    Returns the bytes that crossed the wire now. When it raises, what had come is kept, and the next call goes on from
    there.
    """
    with contextlib.ExitStack() as stack:
        work = _Work(run)
        for item in items:
            part = Part(item)
            stack.callback(part.close)
            work.add(part)
        others = min(source.streams, -(-work.pending_bytes // STREAM_BYTES)) - 1
        threads = [
            threading.Thread(target=work.serve_another, args=(source,), name=f"collect-{number}", daemon=True)
            for number in range(others)
        ]
        for thread in threads:
            thread.start()
        try:
            try:
                work.serve(conversation)
            except OpsError as error:
                work.failed(error)
            for thread in threads:
                thread.join()
        except BaseException:
            work.stop()
            for thread in threads:
                thread.join(STOP_PATIENCE_S)
            raise
        work.refuse_rest()
        return work.moved


class _Work:
    """The pieces that are still to come; shared by those who bring them."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._lock = threading.Condition()
        self._in_flight = 0
        self._pieces: list[tuple[Part, Span]] = []
        self._left: dict[Part, int] = {}
        self._stopped = False
        self._open: set[Conversation] = set()
        self.moved = 0
        self._errors: list[Exception] = []

    @property
    def pending_bytes(self) -> int:
        return sum(end - start for _, (start, end) in self._pieces)

    def add(self, part: Part) -> None:
        spans = part.missing
        self._pieces += [(part, span) for span in spans]
        self._left[part] = len(spans)
        if not spans:
            part.finish()

    def serve(self, conversation: Conversation) -> None:
        """Brings pieces until none is left."""
        with self._lock:
            if self._stopped:
                return
            self._open.add(conversation)
        try:
            while (piece := self._take()) is not None:
                self._bring(conversation, *piece)
        finally:
            with self._lock:
                self._open.discard(conversation)

    def serve_another(self, source: Source) -> None:
        """The same over a conversation of its own; in a thread of its own."""
        try:
            with source.conversation() as conversation:
                self.serve(conversation)
        except Exception as error:  # told to whoever waits for all
            self.failed(error)

    def failed(self, error: Exception) -> None:
        """Kept for `refuse_rest`: another may do what this one could not."""
        with self._lock:
            self._errors.append(error)

    def refuse_rest(self) -> None:
        """Raises what stopped the pieces that are not here. One that broke is no matter where others did its part."""
        lost = [error for error in self._errors if isinstance(error, TransportError) and error.lost]
        for error in [one for one in self._errors if one not in lost] + (lost if self._pieces else []):
            raise error

    def stop(self) -> None:
        """Ends every conversation, so that no thread waits for bytes any more."""
        with self._lock:
            self._stopped, conversations = True, list(self._open)
            self._lock.notify_all()
        for conversation in conversations:
            conversation.close()

    def _take(self) -> tuple[Part, Span] | None:
        """None when all is here, or nobody is to go on. One that is in flight may come back, so it is waited for."""
        with self._lock:
            while not self._pieces and self._in_flight and not self._stopped:
                self._lock.wait()
            if self._stopped or not self._pieces:
                return None
            self._in_flight += 1
            return self._pieces.pop(0)

    def _bring(self, conversation: Conversation, part: Part, span: Span) -> None:
        start, end = span
        at = start

        def on_data(_: int, data: bytes) -> None:
            nonlocal at
            if at + len(data) > end:
                raise TransportError(f"the host sends more of {part.item.remote} than was asked for", kind="protocol")
            part.write(at, data)
            at += len(data)

        try:
            conversation.request(
                "read",
                {"run": self._run, "path": part.item.remote, "offset": start, "length": end - start},
                on_data=on_data,
            )
        except TransportError as error:
            if error.lost:
                # for whoever comes next
                with self._lock:
                    self._pieces.append((part, (at, end)))
            raise
        finally:
            if at > start:
                part.note((start, at))
            with self._lock:
                self.moved += at - start
                self._in_flight -= 1
                self._lock.notify_all()
        if at < end:
            raise TransportError(f"the host sends less of {part.item.remote} than it told", kind="protocol")
        with self._lock:
            self._left[part] -= 1
            last = self._left[part] == 0
        if last:
            part.finish()


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as handle:
        while chunk := handle.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
