"""Text that others wrote, made safe for a terminal: it may be read, and may not move, colour or rename anything."""

from __future__ import annotations

import re
from typing import Any

# colours and cursor movements say nothing once they are harmless
_SEQUENCE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x9b[0-?]*[ -/]*[@-~]")
# what is left of C0 and C1, and the marks that turn the direction of what follows
_CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


def plain(text: str) -> str:
    """Without terminal sequences; any other control character becomes visible (`\\x07`). Tabs and line ends stay."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), _SEQUENCE.sub("", text))


def plain_value(value: Any) -> Any:
    """A JSON value with every text in it plain; keys are ours."""
    if isinstance(value, str):
        return plain(value)
    if isinstance(value, dict):
        return {key: plain_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_value(item) for item in value]
    return value
