"""Errors that people and the caller of the trainer contract see."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass


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


class Aborted(TrainerError):  # noqa: N818 -- not an error of its own: another worker's failure releases this one
    """Raised in a worker that waited when another worker failed."""


class WorkerFailed(TrainerError):  # noqa: N818 -- reads as the fact it reports
    """A worker raised; `worker` is its name and `__cause__` its exception."""

    def __init__(self, worker: str, cause: BaseException, trace: str) -> None:
        super().__init__(f"{worker} failed: {type(cause).__name__}: {cause}")
        self.worker = worker
        self.trace = trace
        self.__cause__ = cause


class Diverged(TrainerError):  # noqa: N818
    """The loss or a gradient is no longer finite."""


def nearest(name: str, known: Iterable[str], *, cutoff: float = 0.5) -> str | None:
    """The known name most like `name`, or None when nothing is like it."""
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return found[0] if found else None
