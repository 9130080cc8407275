"""Errors that people and the caller of the trainer contract see."""

from __future__ import annotations

import difflib
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import PurePath


class TrainerError(Exception):
    """Base of every error that this package raises on purpose."""


@dataclass(eq=False)
class InputError(TrainerError):
    """Settings or input refused (exit code 2): what is wrong, where, and the nearest right thing."""

    what: str
    where: str
    fix: str

    def __str__(self) -> str:
        return f"{self.what} (at {self.where}); {self.fix}"


@dataclass(frozen=True)
class Caution:
    """Settings that are allowed and may be regretted; otherwise as `InputError`."""

    what: str
    where: str
    fix: str

    def __str__(self) -> str:
        return f"{self.what} (at {self.where}); {self.fix}"


class Aborted(TrainerError):  # noqa: N818 -- not an error of its own: another worker's failure releases this one
    """Raised in a worker that waited when another worker failed."""


class WorkerFailed(TrainerError):  # noqa: N818 -- reads as the fact it reports
    """A worker raised; `worker` is its name and `__cause__` its exception."""

    def __init__(self, worker: str, cause: BaseException, trace: str) -> None:
        super().__init__(f"{worker} failed: {headline(cause)}")
        self.worker = worker
        self.trace = trace
        self.__cause__ = cause


def headline(error: BaseException) -> str:
    """One line: type and first line of its text; of an error without a text, where it was raised."""
    words = str(error).strip().splitlines()
    if words:
        return f"{type(error).__name__}: {words[0]}"
    frames = traceback.extract_tb(error.__traceback__)
    where = f" at {PurePath(frames[-1].filename).name}:{frames[-1].lineno}, in {frames[-1].name}" if frames else ""
    return f"{type(error).__name__}{where}"


def told_whole(error: BaseException) -> str:
    """Its traceback, and its headline as the last line, which is what a summary shows."""
    failure = error.trace if isinstance(error, WorkerFailed) else "".join(traceback.format_exception(error))
    cause = error.__cause__ if isinstance(error, WorkerFailed) else error
    return f"{failure.strip()}\n{headline(cause or error)}"


class EndpointFailed(TrainerError):  # noqa: N818
    """The endpoint did not answer, however often it was asked; what it had answered is kept."""


class Diverged(TrainerError):  # noqa: N818
    """The loss or a gradient is no longer finite."""


def nearest(name: str, known: Iterable[str], *, cutoff: float = 0.5) -> str | None:
    """The known name most like `name`, or None when nothing is like it."""
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return found[0] if found else None
