"""Frames survive any way of being cut, and nothing else passes for one."""

from __future__ import annotations

import io
import struct

import pytest

from dflash_ops.agent.frames import (
    BEAT,
    DATA,
    JSON,
    MAX_PAYLOAD,
    Frame,
    FrameDecoder,
    FrameError,
    FrameReader,
    encode_data,
    encode_frame,
    write_frame,
)

FRAMES = [Frame(JSON, b'{"id": 1}'), Frame(BEAT, b""), Frame(DATA, b"\x01" + bytes(range(256)) * 3)]


def test_layout_is_type_length_payload() -> None:
    assert encode_frame(JSON, b"{}") == b"J\x00\x00\x00\x02{}"
    assert encode_data(1, b"ab") == b"D\x00\x00\x00\x03\x01ab"


@pytest.mark.parametrize("size", [1, 2, 7, 10_000])
def test_frames_cut_anywhere_come_out_whole(size: int) -> None:
    wire = b"".join(encode_frame(*frame) for frame in FRAMES)
    decoder = FrameDecoder()
    found = [frame for start in range(0, len(wire), size) for frame in decoder.feed(wire[start : start + size])]
    assert found == FRAMES
    assert not decoder.torn


def test_an_oversized_frame_is_refused_before_its_payload_comes() -> None:
    with pytest.raises(FrameError, match="at most"):
        list(FrameDecoder().feed(struct.pack(">cI", b"D", MAX_PAYLOAD + 1)))
    with pytest.raises(FrameError, match="at most"):
        encode_frame(DATA, bytes(MAX_PAYLOAD + 1))


def test_an_unknown_type_is_refused() -> None:
    with pytest.raises(FrameError, match="unknown"):
        list(FrameDecoder().feed(b"X\x00\x00\x00\x00"))


def test_frames_before_a_bad_one_are_delivered() -> None:
    found = []
    with pytest.raises(FrameError):
        for frame in FrameDecoder().feed(encode_frame(BEAT) + b"XXXXX"):
            found.append(frame)
    assert found == [Frame(BEAT, b"")]


def test_a_reader_tells_a_clean_end_from_a_torn_one() -> None:
    reader = FrameReader(io.BytesIO(encode_frame(JSON, b"{}")))
    assert reader.read() == Frame(JSON, b"{}")
    assert reader.read() is None
    torn = FrameReader(io.BytesIO(encode_frame(JSON, b"{}")[:-1]))
    with pytest.raises(FrameError, match="middle"):
        torn.read()


def test_a_frame_is_written_whole_to_a_file_that_takes_parts() -> None:
    class Slow(io.RawIOBase):
        taken = b""

        def writable(self) -> bool:
            return True

        def write(self, data: memoryview) -> int:
            self.taken += bytes(data[:3])
            return min(3, len(data))

    slow = Slow()
    write_frame(slow, DATA, b"\x00abcdefgh")
    assert slow.taken == encode_data(0, b"abcdefgh")
