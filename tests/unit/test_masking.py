"""No secret comes through, however the bytes are cut; and nothing else is lost."""

from __future__ import annotations

import json
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from dflash_ops.agent.masking import MaskedStream, Masks
from dflash_ops.deploy.events import Event, Events

SECRETS = st.lists(st.text("ab", min_size=2, max_size=5), max_size=3)


def streamed(masks: Masks, pieces: list[bytes]) -> bytes:
    stream = MaskedStream(masks)
    return b"".join([*map(stream.feed, pieces), stream.rest()])


@given(SECRETS, st.text("abc", max_size=30), st.lists(st.integers(0, 30), max_size=5))
def test_a_stream_is_masked_as_if_it_came_in_one_piece(secrets: list[str], text: str, cuts: list[int]) -> None:
    masks = Masks.of(secrets)
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[start:end].encode() for start, end in pairwise(places)]
    assert streamed(masks, pieces) == streamed(masks, [text.encode()])


@given(SECRETS, st.lists(st.text("abc", max_size=6), max_size=6))
def test_no_secret_comes_through(secrets: list[str], pieces: list[str]) -> None:
    told = streamed(Masks.of(secrets), [piece.encode() for piece in pieces]).decode()
    assert not any(secret in told for secret in secrets)


@given(st.lists(st.binary(max_size=20), max_size=6))
def test_without_a_secret_every_byte_is_as_it_was(pieces: list[bytes]) -> None:
    assert streamed(Masks.of(["not in any of these"]), pieces) == b"".join(pieces)


def test_a_line_is_not_held_back() -> None:
    assert MaskedStream(Masks.of(["hf_secret"])).feed(b"step 1\n") == b"step 1\n"


def test_other_spellings_of_a_secret() -> None:
    secret = 'pa"ss\\w/örd'
    masks = Masks.of([secret])
    error = ValueError({"token": secret})
    shown = [json.dumps({"t": secret}), str(error), "https://x/?t=pa%22ss%5Cw%2F%C3%B6rd", f"{secret}!"]
    assert [masks.text(text) for text in shown] == ['{"t": "***"}', "{'token': '***'}", "https://x/?t=***", "***!"]


def test_no_event_holds_a_secret_wherever_it_came_in() -> None:
    seen: list[Event] = []
    events = Events(seen.append)
    events.hide(Masks.of(["hf_secret"]))
    events.emit("error", what="x hf_secret", evidence=[{"a": ("hf_secret",)}, 3], secret_hf=None)
    assert "hf_secret" not in json.dumps(seen)
    assert seen[0]["evidence"] == [{"a": ["***"]}, 3]
