"""`# dflash: allow[rule-id] reason`: a finding that someone looked at and wants to keep."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

_COMMENT = re.compile(r"#\s*dflash:\s*allow\[([^\]]*)\][ \t:]*(.*)")


@dataclass(frozen=True)
class Allowances:
    """The comments of one file: by line (from 1), then by rule, the reason (it may be empty)."""

    lines: Mapping[int, Mapping[str, str]]

    @classmethod
    def read(cls, source: bytes) -> Allowances:
        """Comments only, never the text of a string. The source must be valid Python."""
        lines: dict[int, dict[str, str]] = {}
        if b"dflash" not in source:
            return cls(lines)
        for token in _tokens(source):
            if token.type == tokenize.COMMENT and (match := _COMMENT.search(token.string)):
                rules = [rule.strip() for rule in match[1].split(",")]
                lines[token.start[0]] = dict.fromkeys(rules, match[2].strip())
        return cls(lines)

    def reason(self, rule: str, first: int, last: int) -> str | None:
        """The reason on one of the lines `first` to `last` of a finding; "" where a comment gives none."""
        reasons = [self.lines[line][rule] for line in range(first, last + 1) if rule in self.lines.get(line, {})]
        return max(reasons, key=len, default=None)


def _tokens(source: bytes) -> Iterator[tokenize.TokenInfo]:
    try:
        yield from tokenize.tokenize(io.BytesIO(source).readline)
    except (tokenize.TokenError, SyntaxError):
        return  # what the compiler takes and tokenize does not: no comment counts after it, findings stay
