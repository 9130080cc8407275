"""A transport starts a program on the host and hands over its three streams. It knows nothing of trainers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from dflash_ops.errors import OpsError, TransportError

Pusher = Callable[[bytes, str], None]
"""Puts bytes into a file on the host beside the conversation. What arrived there nobody knows: verify it there."""


class Channel(Protocol):
    """A running remote program. One reader, one writer; stderr is drained in the background and kept bounded."""

    def read(self, size: int) -> bytes:
        """At least one byte, at most `size`; b"" at end of file."""

    def write(self, data: bytes) -> None:
        """All of `data`, or TransportError."""

    def stderr(self) -> str:
        """The last bytes that the program wrote to standard error."""

    def wait(self, timeout: float) -> int | None:
        """Exit status, or None when it is unknown after `timeout` seconds."""

    def close(self) -> None:
        """Drops the connection. What runs detached on the host goes on."""

    def abandon(self) -> None:
        """As `close`, where the peer is silent: what carries the channel is taken for dead too, so that the next one
        does not wait on it."""


class Transport(Protocol):
    """The way to one host. `open` may be called again after a channel broke."""

    name: str

    @property
    def pusher(self) -> Pusher | None:
        """None: bytes ride in the conversation."""

    def open(self, argv: Sequence[str]) -> Channel:
        """Starts `argv` on the host (no shell interprets it).

        Its output may begin with what the way there prints: a login banner, what a node tells of a container. A program
        whose output must be known from that prints a mark of its own first.
        """

    def explain(self, status: int | None, stdout: str, stderr: str) -> OpsError | None:
        """The typed error behind a program that did not start, where this transport knows the words."""

    def broke(self) -> TransportError | None:
        """Why a program that ran there is gone, where this transport can ask: a container was stopped, say."""

    def close(self) -> None: ...
