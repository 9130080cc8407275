"""What a playbook says of the packages that its trainer runs with, and the lock that it names."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from dflash_ops.agent.lockfile import MAX_BYTES, BadLock, Lock, parse_lock
from dflash_ops.config.asset import Asset
from dflash_ops.config.base import TEXT, Matches, Model
from dflash_ops.config.errors import Problem
from dflash_ops.config.places import shown
from dflash_ops.limits import LONGEST_S


class Environment(Model):
    """A managed environment: made on the host from a lock, named by its content, and never changed afterwards."""

    lock: Annotated[str, TEXT]
    """pip's requirements file with a hash for every package, on this machine, relative to this file."""
    wheels: Asset | None = None
    """A folder of wheels that is taken in place of an index; one that is sent goes into the host's assets."""
    python: Annotated[str, Matches(r"3\.\d{1,2}(\.\d{1,2})?", "like '3.12'")] | None = None
    """The version that the lock was made for: a host whose `python` is another one is refused."""
    timeout_s: Annotated[int, Field(ge=1, le=LONGEST_S)] = 3600
    """Seconds that making it may take."""


def lock_text(path: Path) -> str:
    """Raises OSError, and ValueError where it is no text of a sensible size."""
    with path.open("rb") as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise ValueError(f"it is larger than {MAX_BYTES >> 20} MiB")
    return data.decode()


def read_lock(path: Path) -> Lock | Problem:
    """The lock, or what is wrong with it at which of its lines."""
    try:
        return parse_lock(lock_text(path))
    except BadLock as error:
        return Problem(shown(path), error.line, error.what, error.hint)
    except OSError as error:
        return Problem(shown(path), None, f"the lock cannot be read: {error.strerror or error}")
    except ValueError as error:
        return Problem(shown(path), None, f"this is no lock: {error}")
