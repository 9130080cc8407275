"""What a host says may be read on a terminal, and does nothing there."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_ops.deploy.events import Event
from dflash_ops.ui.human import HumanView
from dflash_ops.ui.plain import plain

TRICKS = "\x1b]0;title\x07\x1b[2J\x1b[31mred\x1b[0m\r\x9b1A\x08\u202eevil\x00"


@given(st.text(alphabet=st.characters() | st.sampled_from("\x1b\x9b[0;mJ\x07")))
def test_nothing_that_a_terminal_acts_on_is_left(text: str) -> None:
    left = {letter for letter in plain(text) if unicodedata.category(letter) in ("Cc", "Cs", "Zl", "Zp")}
    assert left <= {"\n", "\t"}


def test_words_stay_readable() -> None:
    assert plain("\x1b[1;31merror\x1b[0m: loss\t1.5 ü €") == "error: loss\t1.5 ü €"
    assert plain("bell\x07") == r"bell\x07"


@pytest.mark.parametrize(
    "event",
    [
        {"event": "log", "source": "run", "line": TRICKS},
        {"event": "error", "what": TRICKS, "where": TRICKS, "fix": TRICKS, "evidence": [TRICKS, {"path": TRICKS}]},
        {"event": "notice", "text": TRICKS},
        {"event": "connected", "host": "box", "hostname": TRICKS, "workdir": TRICKS},
        {
            "event": "run",
            "run": TRICKS,
            "state": TRICKS,
            "devices": [TRICKS],
            "started": None,
            "skipped_canary": TRICKS,
        },
        {"event": "ended", "run": TRICKS, "state": TRICKS},
    ],
)
def test_no_event_reaches_the_terminal_raw(event: Event, capfd: pytest.CaptureFixture[str]) -> None:
    HumanView()(event)
    shown = "".join(capfd.readouterr())
    assert "evil" in shown
    assert not set(shown) & set("\x1b\x9b\x07\x08\x00\r\u202e")
