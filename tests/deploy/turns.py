"""A way to this machine that counts: programs started there, and how often we wait for an answer before we go on."""

from __future__ import annotations

from collections.abc import Sequence

from dflash_ops.agent.frames import BEAT
from dflash_ops.transport.local import LocalChannel, LocalTransport


class CountingChannel(LocalChannel):
    turns = 0
    """Round trips: times that something was said after something had been heard (a start is the first)."""
    _heard = True

    def write(self, data: bytes) -> None:
        if data[:1] != BEAT:
            self.turns += self._heard
            self._heard = False
        super().write(data)

    def read(self, size: int) -> bytes:
        data = super().read(size)
        if data[:1] != BEAT or len(data) > 5:
            self._heard = True
        return data


class CountingTransport(LocalTransport):
    def __init__(self) -> None:
        self.channels: list[CountingChannel] = []

    def open(self, argv: Sequence[str]) -> CountingChannel:
        self.channels.append(CountingChannel(super().open(argv)._process))
        return self.channels[-1]

    @property
    def turns(self) -> int:
        return sum(channel.turns for channel in self.channels)
