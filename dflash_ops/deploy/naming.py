"""How a release on a host is named: `current`, `previous`, or the beginning of its digest."""

from __future__ import annotations

import re

DIGITS = 8
"""Of a digest, so that a name does not fit by accident."""
HOW = f"say `current`, `previous` or at least {DIGITS} digits of one; without --release it is built anew"
WORDS = ("current", "previous")
_DIGEST = re.compile(rf"[0-9a-f]{{{DIGITS},64}}")


def may_name(name: str) -> bool:
    """Whether any release can be called so."""
    return name in WORDS or _DIGEST.fullmatch(name) is not None
