"""The one error for bad settings or input."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class InputError(Exception):
    """Settings or input refused (exit 2): what is wrong, where, and the nearest right thing."""

    def __init__(self, what: str, where: str, fix: str) -> None:
        super().__init__(f"{what} ({where}); {fix}")
        self.what = what
        self.where = where
        self.fix = fix


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a hint that names the closest of `known`."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
    return f"did you mean `{close[0]}`?" if close else "known: " + ", ".join(names)
