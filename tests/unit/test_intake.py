"""What comes over paramiko reaches the reader whole, in order, and with an end."""

from __future__ import annotations

import hashlib
import os
import socket
import threading

import pytest
from paramiko.buffered_pipe import PipeTimeout

from dflash_ops.transport.intake import Pieces, ReadAhead


def test_pieces_come_out_in_order_however_they_are_asked_for() -> None:
    pieces, sent = Pieces(), [os.urandom(size) for size in (1, 70_000, 3, 32_768, 9)]
    for data in sent:
        pieces.feed(data)
    assert len(pieces) == sum(map(len, sent))
    got = b""
    for size in (1, 5, 100_000, 4, 1 << 20):
        got += pieces.read(size)
    assert got == b"".join(sent)
    assert (len(pieces), pieces.read_ready()) == (0, False)


def test_a_reader_waits_for_bytes_for_a_time_or_for_the_end() -> None:
    pieces = Pieces()
    with pytest.raises(PipeTimeout):
        pieces.read(1, 0.0)
    with pytest.raises(PipeTimeout):
        pieces.read(1, 0.01)
    threading.Timer(0.05, pieces.feed, (b"late",)).start()
    assert pieces.read(10, 60) == b"late"
    threading.Timer(0.05, pieces.close).start()
    assert pieces.read(10) == b""
    pieces.feed(b"x")
    assert (pieces.read(10), pieces.read(10)) == (b"x", b"")


def test_many_bytes_from_another_thread() -> None:
    pieces, data = Pieces(), os.urandom(3 << 20)

    def feed() -> None:
        for start in range(0, len(data), 30_011):
            pieces.feed(data[start : start + 30_011])
        pieces.close()

    threading.Thread(target=feed, daemon=True).start()
    found = hashlib.sha256()
    while block := pieces.read(256 * 1024, 60):
        found.update(block)
    assert found.digest() == hashlib.sha256(data).digest()


def test_a_socket_that_reads_ahead_gives_what_is_asked_for_and_keeps_its_timeouts() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ahead = ReadAhead(ours)
        theirs.sendall(b"abcdefgh")
        assert [ahead.recv(size) for size in (1, 3, 100)] == [b"a", b"bcd", b"efgh"]
        ahead.settimeout(0.01)
        with pytest.raises(TimeoutError):
            ahead.recv(1)
        assert ahead.fileno() == ours.fileno()
        theirs.close()
        assert (ahead.recv(1), ahead.recv(1)) == (b"", b"")
