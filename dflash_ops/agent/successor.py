"""runs/<run>/next.json: the run that continues this one, or why none does."""

from __future__ import annotations

import enum
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Dict, Optional

from .files import read_json, write_json

NAME = "next.json"


class Kind(str, enum.Enum):
    RESUME = "resume"
    RESTART = "restart"


class Outcome(str, enum.Enum):
    """WAITING: for its time to come. REFUSED: the host would not start it; `why` says so. STOPPED: somebody did."""

    WAITING = "waiting"
    STARTED = "started"
    REFUSED = "refused"
    STOPPED = "stopped"


@dataclass(frozen=True)
class Successor:
    """`run` is null where there is none; `due` is when a restart is to begin (Unix seconds); `left` counts restarts."""

    kind: Kind
    outcome: Outcome
    run: Optional[str] = None
    why: Optional[str] = None
    due: Optional[float] = None
    left: Optional[int] = None

    @classmethod
    def of(cls, folder: Path) -> "Optional[Successor]":
        """None where nothing is known of one."""
        value = read_json(folder / NAME)
        if value is None:
            return None
        try:
            fields = {name: value[name] for name in ("run", "why", "due", "left")}
            named = fields["run"] is None or isinstance(fields["run"], str)
            return cls(Kind(value["kind"]), Outcome(value["outcome"]), **fields) if named else None
        except (KeyError, ValueError):
            return None

    def write(self, folder: Path) -> None:
        write_json(folder / NAME, {"v": 1, **self.to_json()})

    def to_json(self) -> Dict[str, Any]:
        return {**asdict(self), "kind": self.kind.value, "outcome": self.outcome.value}
