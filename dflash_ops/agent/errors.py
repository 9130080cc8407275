"""Errors that a person reads: what failed, where, and the one thing to do next."""

from __future__ import annotations

import enum
from dataclasses import asdict, dataclass
from typing import Any, Dict, Optional


class ExitCode(enum.IntEnum):
    """Exit codes of the `dflash-ops` command that the agent may ask for."""

    USAGE = 2
    REFUSED = 3
    TRANSPORT = 4
    BLOCKED = 5
    CANARY_FAILED = 6
    CANARY_INCONCLUSIVE = 7
    RUN_FAILED = 8
    LOCKED = 9


@dataclass
class AgentError(Exception):
    """An error that ends one request.

    `kind` is a stable word for programs; `what`, `where` and `fix` are sentences for people; `exit` is the exit
    code of the client's command; `evidence` is JSON (log lines, findings) or None.
    """

    kind: str
    what: str
    where: str
    fix: str
    exit: ExitCode
    evidence: Optional[Any] = None

    def __str__(self) -> str:
        return f"{self.what} ({self.where}). {self.fix}"

    def to_json(self) -> Dict[str, Any]:
        return {**asdict(self), "exit": int(self.exit)}


class ClientGone(Exception):  # noqa: N818
    """The client's end of the conversation is closed: nothing new may be started."""
