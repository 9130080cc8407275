from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dflash_ops.deploy.lines import LONGEST, LineSplitter, gist


@given(st.text(alphabet="aä€\U0001f600 \n"), st.integers(1, 7))
def test_every_line_once_however_the_bytes_are_cut(text: str, size: int) -> None:
    seen: list[str] = []
    splitter = LineSplitter(seen.append)
    data = text.encode()
    for start in range(0, len(data), size):
        splitter.feed(data[start : start + size])
    splitter.close()
    expected = text.split("\n")
    assert seen == (expected[:-1] if expected[-1] == "" else expected)


def test_progress_bars_keep_their_last_state() -> None:
    seen: list[str] = []
    splitter = LineSplitter(seen.append)
    splitter.feed(b" 10%\r 50%\r100%\ndone\r\nrest")
    splitter.close()
    assert seen == ["100%", "done", "rest"]


def test_broken_utf8_is_replaced_not_fatal() -> None:
    seen: list[str] = []
    splitter = LineSplitter(seen.append)
    splitter.feed(b"a\xff\xfeb\n\xe2\x82")
    splitter.close()
    assert seen == ["a\ufffd\ufffdb", "\ufffd"]


def test_a_line_without_end_comes_in_pieces_and_fills_no_memory() -> None:
    seen: list[str] = []
    splitter = LineSplitter(seen.append)
    for _ in range(50):
        splitter.feed(b"x" * 100_000)
        assert sum(map(len, splitter._rest)) <= LONGEST
    splitter.feed(b"\nnext\n")
    assert "".join(seen) == "x" * 5_000_000 + "next"
    assert max(map(len, seen)) <= LONGEST


def test_a_progress_bar_without_end_fills_no_memory_and_keeps_its_last_state() -> None:
    seen: list[str] = []
    splitter = LineSplitter(seen.append)
    for number in range(500):
        splitter.feed(b" " * 10_000 + f"{number}%\r".encode())
        assert sum(map(len, splitter._rest)) <= LONGEST
    splitter.feed(b"done\n")
    assert seen == ["done"]


def test_the_gist_of_a_traceback_is_its_last_line() -> None:
    assert gist("Traceback (most recent call last):\n  File 'a.py', line 1\nRuntimeError: no\n\n") == "RuntimeError: no"
    assert gist("gradients within 1e-6") == "gradients within 1e-6"
    assert gist("") == ""
