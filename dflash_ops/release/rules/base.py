"""What a compile-safety rule is."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from dflash_ops.release.finding import Severity
from dflash_ops.release.resolve import Module
from dflash_ops.release.threads import Threads


@dataclass(frozen=True)
class Hit:
    """A place where a rule is broken: lines from 1, `first_line` to `last_line` inclusive; an allow comment may
    stand on any of them. `why` takes two lines at most."""

    severity: Severity
    first_line: int
    last_line: int
    why: str
    fix: str


@dataclass(frozen=True)
class Rule:
    """`find` gets one file, and what the release that it belongs to runs in threads."""

    id: str
    find: Callable[[Module, Threads], Iterable[Hit]]


def hit_at(node: ast.expr | ast.stmt, severity: Severity, why: str, fix: str) -> Hit:
    return Hit(severity, node.lineno, node.end_lineno or node.lineno, why, fix)
