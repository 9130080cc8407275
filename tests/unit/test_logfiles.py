"""A log on the disk: cut into files at line ends, never above its cap, honest about what is missing."""

from __future__ import annotations

import random
import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dflash_ops.agent.logfiles import LogFolder, LogWriter


@pytest.fixture
def folder(tmp_path: Path) -> LogFolder:
    return LogFolder(tmp_path)


def content(folder: LogFolder) -> list[bytes]:
    return [folder.file(one).read_bytes() for one in folder.generations()]


def pieces(seed: int, count: int) -> Iterator[bytes]:
    """Lines of any length, some far longer than a file, in pieces that know nothing of lines."""
    chance = random.Random(seed)
    text = b"".join(
        b"%d " % number + b"x" * chance.choice((0, 3, 40, 99, 700)) + chance.choice((b"\n", b"\n", b"\r"))
        for number in range(count)
    )
    while text:
        size = chance.choice((1, 7, 64, 1000))
        yield text[:size]
        text = text[size:]


@pytest.mark.parametrize("seed", range(3))
def test_every_byte_is_there_in_order_and_files_end_with_lines(folder: LogFolder, seed: int) -> None:
    writer, written = LogWriter(folder, 100, 10**6), b""
    for piece in pieces(seed, 150):
        writer.write(piece)
        written += piece
        assert folder.file(folder.generations()[-1]).stat().st_size > 0, "what came is there at once"
    files = content(folder)
    assert b"".join(files) == written
    assert len(files) > 20
    assert folder.generations() == list(range(len(files)))
    for file in files[:-1]:
        assert 100 <= len(file) <= 200
        assert file.endswith(b"\n") or len(file) == 200


@pytest.mark.parametrize("seed", range(3))
def test_a_cap_holds_at_every_moment_and_what_is_missing_is_counted(folder: LogFolder, seed: int) -> None:
    cap, written = 5000, b""
    writer = LogWriter(folder, 300, cap)
    for number, piece in enumerate(pieces(seed, 200)):
        if number % 50 == 49:
            # another writer goes on where this one was killed
            writer = LogWriter(folder, 300, cap)
        writer.write(piece)
        written += piece
        assert sum(path.stat().st_size for path in folder.path.iterdir()) <= cap
    files, gap = content(folder), folder.gap_file.read_text()
    assert written.startswith(files[0])
    assert written.endswith(b"".join(files[1:]))
    told = re.fullmatch(r"dflash-ops: (\d+) bytes of log \(generations 1 to (\d+)\) were dropped here: .*\n", gap)
    assert told
    assert int(told.group(1)) == len(written) - sum(map(len, files)) > 0
    assert folder.generations()[1] == int(told.group(2)) + 1
    names = sorted(path.name for path in folder.path.iterdir())
    assert names[:2] == ["000000.log", "000001-dropped.log"], "read in the order of names, the line is in its place"


@contextmanager
def no_file_above(size: int) -> Iterator[None]:
    """The kernel takes no more bytes of a file, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_that_takes_no_more_loses_bytes_and_the_log_says_how_many(folder: LogFolder) -> None:
    writer = LogWriter(folder, 10**6, 10**7)
    with no_file_above(10):
        writer.write(b"one\ntwo\nthree\n")
        writer.write(b"four\n")
        assert not writer.settle()
    assert folder.file(0).read_bytes() == b"one\ntwo\nth"
    writer.write(b"five\n")
    assert writer.settle()
    (log,) = content(folder)
    assert log == b"one\ntwo\nth\ndflash-ops: 9 bytes of log were lost here: File too large\nfive\n"


def test_our_own_line_is_whole_also_where_the_disk_took_half_of_it(folder: LogFolder) -> None:
    writer = LogWriter(folder, 10**6, 10**7)
    with no_file_above(4):
        writer.write(b"one\ntwo\n")
    with no_file_above(20):
        writer.write(b"three\n")
        writer.write(b"four\n")
    writer.write(b"five\n")
    (log,) = content(folder)
    assert log == (
        b"one\ndflash-ops: 4 bytes of log were lost here: File too large\n"
        b"dflash-ops: 11 bytes of log were lost here: File too large\nfive\n"
    )


def test_the_last_lines_may_lie_in_several_files(folder: LogFolder) -> None:
    writer = LogWriter(folder, 20, 10**6)
    for number in range(50):
        writer.write(b"line %d\n" % number)
    assert folder.tail(10) == [f"line {number}" for number in range(40, 50)]
    assert folder.tail(1000) == [f"line {number}" for number in range(50)]


def test_what_follows_a_generation_is_the_next_that_is_there(folder: LogFolder) -> None:
    assert folder.following(0) is None
    for generation in (0, 5, 1_000_000):
        folder.file(generation).write_bytes(b"")
    folder.gap_file.write_text("")
    assert [folder.following(one) for one in (0, 1, 4, 5, 1_000_000)] == [5, 5, 5, 1_000_000, None]
