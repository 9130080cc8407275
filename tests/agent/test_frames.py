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

DATA_BYTES = bytes(range(256)) * 3
WIRE = encode_frame(JSON, b'{"id": 1}') + encode_frame(BEAT) + encode_data(1, DATA_BYTES) + encode_data(0, b"ab")


def test_layout_is_type_length_payload() -> None:
    assert encode_frame(JSON, b"{}") == b"J\x00\x00\x00\x02{}"
    assert encode_data(1, b"ab") == b"D\x00\x00\x00\x03\x01ab"


@pytest.mark.parametrize("size", [1, 2, 7, 10_000])
def test_frames_cut_anywhere_come_out_whole_and_of_data_every_byte(size: int) -> None:
    decoder = FrameDecoder()
    found = [frame for start in range(0, len(WIRE), size) for frame in decoder.feed(WIRE[start : start + size])]
    assert found[:2] == [Frame(JSON, b'{"id": 1}'), Frame(BEAT, b"")]
    assert {frame.kind for frame in found[2:]} == {DATA}
    streams = {number: b"".join(f.payload for f in found[2:] if f.stream == number) for number in (0, 1)}
    assert streams == {0: b"ab", 1: DATA_BYTES}
    assert not decoder.torn


def test_data_is_handed_on_before_its_frame_is_whole() -> None:
    decoder = FrameDecoder()
    assert list(decoder.feed(encode_data(1, b"abcdef")[:9])) == [Frame(DATA, b"abc", 1)]
    assert decoder.torn


def test_data_without_a_stream_is_no_frame() -> None:
    with pytest.raises(FrameError, match="stream"):
        list(FrameDecoder().feed(encode_frame(DATA)))


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
