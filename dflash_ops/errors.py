"""Errors are for a person: what failed, where, on which evidence, what to type next; and the exit code."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import IntEnum

# controls, line ends, marks that turn the direction of what follows, and bytes that are no text
_UNSHOWN = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """One line that moves nothing: whatever a name has in it that cannot be shown is escaped, as `\\n`."""
    return _UNSHOWN.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class ExitCode(IntEnum):
    """What a command's exit status means. Documented in docs/exit-codes.md."""

    DONE = 0
    BUG = 1
    USAGE = 2
    REFUSED = 3
    UNREACHABLE = 4
    BLOCKED = 5
    CANARY_FAILED = 6
    INCONCLUSIVE = 7
    RUN_FAILED = 8
    LOCKED = 9
    TIMED_OUT = 10
    INTERRUPTED = 130


AGAIN = "run the same command again"
STOPPED = "container_stopped"
"""`kind` of a TransportError: nothing that ran there is there any more."""


class OpsError(Exception):
    """One failure, told once.

    `kind` is a stable word for programs, `what` and `where` are for the reader, `fix` is the next thing to do. Names
    may stand in them as they are: each is made one printable line.
    """

    def __init__(
        self,
        what: str,
        *,
        exit_code: ExitCode,
        kind: str,
        where: str = "",
        fix: str = "",
        evidence: object = None,
    ) -> None:
        super().__init__(what)
        self.what = printable(what)
        self.exit_code = exit_code
        self.kind = kind
        self.where = printable(where)
        self.fix = printable(fix)
        self.evidence = evidence

    @classmethod
    def from_agent(cls, error: Mapping[str, object], host: str) -> OpsError:
        """The error object of an agent's reply (docs/agent-protocol.md)."""
        where = str(error.get("where") or "")
        code = error.get("exit")
        what = str(error.get("what") or "the agent gave no reason")
        made = cls(
            what,
            exit_code=ExitCode(code) if isinstance(code, int) and code in set(ExitCode) else ExitCode.RUN_FAILED,
            kind=str(error.get("kind") or "agent"),
            where=f"{host}: {where}" if where else host,
            fix=str(error.get("fix") or ""),
            evidence=error.get("evidence"),
        )
        # what a trainer or pip says may have several lines
        made.what = "\n".join(map(printable, what.splitlines()))
        return made

    def as_event(self) -> dict[str, object]:
        return {
            "event": "error",
            "kind": self.kind,
            "what": self.what,
            "where": self.where,
            "fix": self.fix,
            "exit": int(self.exit_code),
            "evidence": self.evidence,
        }


class TransportError(OpsError):
    """The host cannot be reached, or the link broke. Says nothing about a run: runs belong to the host."""

    def __init__(
        self, what: str, *, where: str = "", fix: str = "", kind: str = "transport", lost: bool = False
    ) -> None:
        fix = fix or (f"a run goes on without us; {AGAIN}" if lost else "")
        super().__init__(what, exit_code=ExitCode.UNREACHABLE, kind=kind, where=where, fix=fix)
        self.lost = lost
        """True where an open conversation broke: worth another try. False where trying again changes nothing."""
