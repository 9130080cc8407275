"""What `systemctl show` says of a failed unit, in words."""

from __future__ import annotations

import pytest

from dflash_ops.agent.units import in_words

# as systemd 252 shows them
FAILED = {
    "LoadState": "loaded",
    "ActiveState": "failed",
    "Result": "signal",
    "ExecMainCode": "2",
    "ExecMainStatus": "9",
}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, "(signal): its supervisor was killed by SIGKILL"),
        ({"Result": "core-dump", "ExecMainCode": "3", "ExecMainStatus": "11"}, "by SIGSEGV, with a core dump"),
        ({"Result": "exit-code", "ExecMainCode": "1", "ExecMainStatus": "1"}, "its supervisor ended with exit code 1"),
        (
            {"Result": "oom-kill"},
            "(oom-kill): its supervisor was killed by SIGKILL; the kernel killed a process of it for its memory",
        ),
        ({"Result": "timeout"}, "it did not stop in time and was killed"),
    ],
)
def test_how_it_ended(change: dict[str, str], words: str) -> None:
    assert words in str(in_words({**FAILED, **change}))


@pytest.mark.parametrize(
    "shown",
    [
        {},
        {**FAILED, "ActiveState": "active", "Result": "success"},
        {**FAILED, "LoadState": "not-found", "ActiveState": "inactive", "Result": "success"},
    ],
)
def test_what_goes_on_or_is_forgotten_says_nothing(shown: dict[str, str]) -> None:
    assert in_words(shown) is None
