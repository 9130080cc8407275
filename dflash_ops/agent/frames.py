"""The wire: `type (1 byte) | length (u32 big endian) | payload`. Shared by the agent and its client."""

from __future__ import annotations

import struct
from typing import IO, Iterator, List, NamedTuple, Optional, Protocol, Union

JSON = b"J"
DATA = b"D"
BEAT = b"H"
KINDS = (JSON, DATA, BEAT)
MAX_PAYLOAD = 8 * 1024 * 1024
LOG_STREAM = 0
METRICS_STREAM = 1
MISSED_BEATS = 3

_HEADER = struct.Struct(">cI")
_READ_SIZE = 256 * 1024


class FrameError(ValueError):
    """The byte stream is not frames: unknown type, oversized frame, or an end in the middle of one."""


class Frame(NamedTuple):
    kind: bytes
    payload: bytes

    def split_data(self) -> "tuple[int, bytes]":
        """The stream number and the bytes of a `D` frame."""
        if self.kind != DATA or not self.payload:
            raise FrameError("a data frame needs a stream number")
        return self.payload[0], self.payload[1:]


def encode_frame(kind: bytes, payload: Union[bytes, bytearray] = b"") -> bytes:
    """One frame as bytes; FrameError when the type is unknown or the payload is over MAX_PAYLOAD."""
    if kind not in KINDS:
        raise FrameError(f"unknown frame type {kind!r}")
    if len(payload) > MAX_PAYLOAD:
        raise FrameError(f"frame of {len(payload)} bytes, at most {MAX_PAYLOAD} are allowed")
    return _HEADER.pack(kind, len(payload)) + bytes(payload)


def encode_data(stream: int, data: bytes) -> bytes:
    """One `D` frame."""
    return encode_frame(DATA, bytes((stream,)) + data)


def write_frame(fileobj: IO[bytes], kind: bytes, payload: bytes = b"") -> None:
    """Writes one frame whole, also to an unbuffered file that takes only a part at a time, and flushes."""
    rest = memoryview(encode_frame(kind, payload))
    while rest:
        written = fileobj.write(rest)
        rest = rest[written if written is not None else 0 :]
    fileobj.flush()


class FrameDecoder:
    """Turns byte chunks of any size into frames; holds at most one unfinished frame."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    @property
    def torn(self) -> bool:
        """Whether a frame has begun and is not complete."""
        return bool(self._buffer)

    def feed(self, data: bytes) -> Iterator[Frame]:
        self._buffer += data
        taken = 0
        try:
            while len(self._buffer) - taken >= _HEADER.size:
                kind, length = _HEADER.unpack_from(self._buffer, taken)
                if kind not in KINDS:
                    raise FrameError(f"unknown frame type {kind!r}")
                if length > MAX_PAYLOAD:
                    raise FrameError(f"frame of {length} bytes, at most {MAX_PAYLOAD} are allowed")
                end = taken + _HEADER.size + length
                if len(self._buffer) < end:
                    break
                payload = bytes(self._buffer[taken + _HEADER.size : end])
                taken = end
                yield Frame(kind, payload)
        finally:
            del self._buffer[:taken]


class Readable(Protocol):
    def read(self, size: int, /) -> Optional[bytes]: ...


class FrameReader:
    """Frames of a file object whose `read(n)` returns what is there (unbuffered), b"" at the end."""

    def __init__(self, fileobj: Readable) -> None:
        self._file = fileobj
        self._decoder = FrameDecoder()
        self._ready: List[Frame] = []

    def read(self) -> Optional[Frame]:
        """The next frame; None at a clean end; FrameError when the stream ends inside a frame."""
        while not self._ready:
            data = self._file.read(_READ_SIZE)
            if data is None:
                continue
            if not data:
                if self._decoder.torn:
                    raise FrameError("the stream ended in the middle of a frame")
                return None
            self._ready = list(self._decoder.feed(data))
        return self._ready.pop(0)
