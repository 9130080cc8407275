from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dflash_ops.deploy.lines import LineSplitter


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
