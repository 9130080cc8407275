"""What a person reads first of an error."""

from __future__ import annotations

import pytest

from trainer.abort import Abort
from trainer.compile import CaptureError
from trainer.errors import headline, told_whole

pytestmark = pytest.mark.torch


def test_the_first_line_of_its_text() -> None:
    assert headline(CaptureError("drafter_0 could not be captured\nWhat usually does it: ...")) == (
        "CaptureError: drafter_0 could not be captured"
    )


def test_without_a_text_the_place_is_said() -> None:
    def fails() -> None:
        raise AssertionError

    with pytest.raises(AssertionError) as caught:
        fails()
    assert headline(caught.value).startswith("AssertionError at test_errors.py:")
    assert headline(caught.value).endswith(", in fails")
    assert headline(AssertionError()) == "AssertionError"


def test_the_whole_story_ends_with_it() -> None:
    abort = Abort()
    try:
        raise RuntimeError("the cause\nand much more")
    except RuntimeError as error:
        abort.fail("drafter-1", error)
        alone = told_whole(error)
    assert abort.failure is not None and str(abort.failure) == "drafter-1 failed: RuntimeError: the cause"
    for told in (told_whole(abort.failure), alone):
        assert "Traceback" in told and "and much more" in told
        assert told.splitlines()[-1] == "RuntimeError: the cause"
