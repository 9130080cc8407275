"""Hiding secrets: `***` in their place, in text, in JSON values and in a stream of bytes. Shared with the client."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Iterable, Tuple

MASK = "***"


def _spellings(secret: str) -> Iterable[str]:
    """As it is, and as it stands in JSON, in a Python traceback and in a URL."""
    import urllib.parse

    return (secret, json.dumps(secret)[1:-1], repr(secret)[1:-1], urllib.parse.quote(secret, safe=""))


@dataclass(frozen=True)
class Masks:
    """The spellings to hide, the longest first: one may be a part of another."""

    spellings: Tuple[str, ...] = ()

    @classmethod
    def of(cls, secrets: Iterable[str]) -> "Masks":
        found = {spelling for secret in secrets for spelling in _spellings(secret)}
        return cls(tuple(sorted(found, key=lambda text: (-len(text), text))))

    def __bool__(self) -> bool:
        return bool(self.spellings)

    def __or__(self, other: "Masks") -> "Masks":
        found = {*self.spellings, *other.spellings}
        return Masks(tuple(sorted(found, key=lambda text: (-len(text), text))))

    def text(self, text: str) -> str:
        for spelling in self.spellings:
            text = text.replace(spelling, MASK)
        return text

    def value(self, value: Any) -> Any:
        """A JSON value with every text in it masked. Keys are left: programs look for them."""
        if not self.spellings:
            return value
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {key: self.value(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.value(item) for item in value]
        return value


class MaskedStream:
    """Masks bytes that come in pieces, wherever they are cut: what may be the beginning of a secret is held back."""

    def __init__(self, masks: Masks) -> None:
        self._secrets = [spelling.encode() for spelling in masks.spellings]
        self._pattern = re.compile(b"|".join(map(re.escape, self._secrets)) or b"(?!)")
        self._held = b""

    def feed(self, data: bytes) -> bytes:
        """What can be told by now."""
        text = self._held + data
        told, done = [], 0
        end = len(text) - max((_beginning(secret, text) for secret in self._secrets), default=0)
        for found in self._pattern.finditer(text):
            if found.start() >= end:
                break
            told += [text[done : found.start()], MASK.encode()]
            done = found.end()
        told.append(text[done:end])
        self._held = text[max(done, end) :]
        return b"".join(told)

    def rest(self) -> bytes:
        """What was held back, at the stream's end."""
        rest, self._held = self._held, b""
        return self._pattern.sub(MASK.encode(), rest)


def _beginning(secret: bytes, text: bytes) -> int:
    """How many of the last bytes of `text` are the beginning of `secret`, and not the whole of it."""
    at = text.find(secret[:1], max(0, len(text) - len(secret) + 1))
    while at >= 0:
        if secret.startswith(text[at:]):
            return len(text) - at
        at = text.find(secret[:1], at + 1)
    return 0
