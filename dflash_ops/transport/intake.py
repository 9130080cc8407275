"""Bytes that come over paramiko, with fewer copies and fewer system calls than it makes by itself."""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from typing import Any

_AT_ONCE = 256 * 1024


class ReadAhead:
    """A socket for paramiko, which asks for each packet in two small reads: what has come is taken in one."""

    def __init__(self, inner: socket.socket) -> None:
        self._inner = inner
        self._held = memoryview(b"")

    def recv(self, size: int) -> bytes:
        if not self._held:
            self._held = memoryview(self._inner.recv(max(size, _AT_ONCE)))
        taken, self._held = self._held[:size], self._held[size:]
        return bytes(taken)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class Pieces:
    """In the place of a channel's `in_buffer`, as far as a channel needs one that has no file descriptor.

    paramiko's is an array that is grown, copied out of twice and cut at its front for every packet.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._pieces: deque[bytes] = deque()
        self._size = 0
        self._closed = False

    def __len__(self) -> int:
        with self._changed:
            return self._size

    def read_ready(self) -> bool:
        return len(self) > 0

    def feed(self, data: bytes) -> None:
        with self._changed:
            self._pieces.append(data)
            self._size += len(data)
            self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()

    def read(self, nbytes: int, timeout: float | None = None) -> bytes:
        """At most `nbytes` of what is there; b"" once it is closed. Raises PipeTimeout. For one reader."""
        from paramiko.buffered_pipe import PipeTimeout

        until = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while not self._pieces and not self._closed:
                left = None if until is None else until - time.monotonic()
                if left is not None and left <= 0:
                    raise PipeTimeout
                self._changed.wait(left)
            taken: list[bytes] = []
            while self._pieces and nbytes > 0:
                piece = self._pieces.popleft()
                if len(piece) > nbytes:
                    self._pieces.appendleft(piece[nbytes:])
                    piece = piece[:nbytes]
                taken.append(piece)
                nbytes -= len(piece)
                self._size -= len(piece)
        return taken[0] if len(taken) == 1 else b"".join(taken)
