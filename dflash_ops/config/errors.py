"""What is wrong in a configuration, and where: all of a file's problems in one error."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from dataclasses import dataclass

from dflash_ops.errors import ExitCode, OpsError, printable


@dataclass(frozen=True)
class Problem:
    """One thing to correct. `file` is a path as shown to the reader, or the option that gave the value."""

    file: str
    line: int | None
    message: str
    hint: str = ""

    def __str__(self) -> str:
        place = self.file if self.line is None else f"{self.file}:{self.line}"
        return printable(f"{place}: {self.message}" + (f"; {self.hint}" if self.hint else ""))


class ConfigError(OpsError):
    """A configuration that cannot be used. Its text has one line for each problem; exit code 2."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        unique = list(dict.fromkeys(problems))
        files = [problem.file for problem in unique]
        self.problems = tuple(sorted(unique, key=lambda problem: (files.index(problem.file), problem.line or math.inf)))
        super().__init__(
            "\n".join(map(str, self.problems)),
            exit_code=ExitCode.USAGE,
            kind="config",
            evidence=[vars(problem) for problem in self.problems],
        )
        # a line for each
        self.what = "\n".join(map(str, self.problems))

    @classmethod
    def one(cls, file: str, line: int | None, message: str, hint: str = "") -> ConfigError:
        return cls([Problem(file, line, message, hint)])


def nearest(word: str, known: Iterable[str]) -> str:
    """A hint that names the nearest known word, or all of them where none is near."""
    words = sorted(known)
    close = difflib.get_close_matches(word, words, n=1, cutoff=0.6)
    if close:
        return f"did you mean '{close[0]}'?"
    return f"known: {', '.join(words)}" if words else ""
