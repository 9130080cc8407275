"""Settings or input that a trainer refused, in its own words."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Optional

from .errors import AgentError, ExitCode
from .files import read_json
from .masking import Masks

REFUSED = 2
"""Exit code of every verb that refuses."""
REFUSED_FILE = "refused.json"
KIND = "refused"


@dataclass(frozen=True)
class Refusal:
    """What is wrong, where in the settings, and the nearest right thing."""

    what: str
    where: str
    fix: str

    @classmethod
    def read(cls, out: Path, log: List[str], masks: Masks) -> "Refusal":
        """Of `refused.json` in `out`. A trainer that left none says it in its log's last line, all in one."""
        told: Optional[Dict[str, Any]] = read_json(out / REFUSED_FILE)
        if told is not None and isinstance(told.get("what"), str):
            told = masks.value(told)
            return cls(told["what"], str(told.get("where") or ""), str(told.get("fix") or ""))
        last = next((line.strip() for line in reversed(log) if line.strip()), "")
        return cls(last or "the trainer refused its settings and gives no reason", "", "")

    def to_json(self) -> Dict[str, str]:
        """As `reason` of a run's exit.json."""
        where = f" ({self.where})" if self.where else ""
        return {"kind": KIND, "what": f"the trainer refused: {self.what}{where}", "fix": self.fix}

    def error(self, verb: str, log: List[str]) -> AgentError:
        where = f"trainer, verb {verb}" + (f", {self.where}" if self.where else "")
        return AgentError(KIND, self.what, where, self.fix or "correct the playbook", ExitCode.USAGE, log)
