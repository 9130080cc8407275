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
    """Of a `D` frame as much as has come: several in a row may be one that was sent."""

    kind: bytes
    payload: bytes
    stream: int = LOG_STREAM
    """Of a `D` frame; its number is not in `payload`."""


def encode_frame(kind: bytes, payload: Union[bytes, bytearray] = b"") -> bytes:
    """One frame as bytes; FrameError when the type is unknown or the payload is over MAX_PAYLOAD."""
    if kind not in KINDS:
        raise FrameError(f"unknown frame type {kind!r}")
    if len(payload) > MAX_PAYLOAD:
        raise FrameError(f"frame of {len(payload)} bytes, at most {MAX_PAYLOAD} are allowed")
    return _HEADER.pack(kind, len(payload)) + bytes(payload)


def head_of_data(stream: int, size: int) -> bytes:
    """What comes before `size` bytes in their `D` frame: whoever sends many need not copy them to put it there."""
    if size >= MAX_PAYLOAD:
        raise FrameError(f"{size} bytes in a data frame, fewer than {MAX_PAYLOAD} are allowed")
    return _HEADER.pack(DATA, size + 1) + bytes((stream,))


def encode_data(stream: int, data: bytes) -> bytes:
    """One `D` frame."""
    return head_of_data(stream, len(data)) + data


def write_frame(fileobj: IO[bytes], kind: bytes, payload: bytes = b"") -> None:
    """Writes one frame whole, also to an unbuffered file that takes only a part at a time, and flushes."""
    rest = memoryview(encode_frame(kind, payload))
    while rest:
        written = fileobj.write(rest)
        rest = rest[written if written is not None else 0 :]
    fileobj.flush()


class FrameDecoder:
    """Turns byte chunks of any size into frames. What comes in `D` frames is handed on as it comes, and not copied."""

    def __init__(self) -> None:
        self._begun = bytearray()
        """Of a header (of data with the stream's number), or of a whole frame that is no data."""
        self._wanted = _HEADER.size
        self._stream = LOG_STREAM
        self._left = 0
        """Bytes of the data frame that are still to come."""

    @property
    def torn(self) -> bool:
        """Whether a frame has begun and is not complete."""
        return bool(self._begun) or self._left > 0

    def feed(self, data: bytes) -> Iterator[Frame]:
        at = 0
        while at < len(data):
            if self._left:
                piece = data[at : at + self._left]
                at += len(piece)
                self._left -= len(piece)
                yield Frame(DATA, piece, self._stream)
                continue
            more = data[at : at + self._wanted - len(self._begun)]
            at += len(more)
            self._begun += more
            if len(self._begun) < self._wanted:
                return
            frame = self._complete()
            if frame is not None:
                yield frame

    def _complete(self) -> Optional[Frame]:
        """The frame that is whole; None where only its header is, or it is data that will come."""
        kind, length = _HEADER.unpack_from(self._begun)
        if self._wanted == _HEADER.size:
            if kind not in KINDS:
                raise FrameError(f"unknown frame type {kind!r}")
            if length > MAX_PAYLOAD:
                raise FrameError(f"frame of {length} bytes, at most {MAX_PAYLOAD} are allowed")
            if kind == DATA and length == 0:
                raise FrameError("a data frame without a stream")
            self._wanted += 1 if kind == DATA else length
            if len(self._begun) < self._wanted:
                return None
        payload = bytes(self._begun[_HEADER.size :])
        self._begun.clear()
        self._wanted = _HEADER.size
        if kind != DATA:
            return Frame(kind, payload)
        self._stream, self._left = payload[0], length - 1
        return None


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
