"""Typed access to a request's JSON: a wrong or missing argument is one clear error."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Dict, List, Optional

from .errors import AgentError, ExitCode

DIGEST = re.compile(r"[0-9a-f]{64}")
_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class Arguments:
    op: str
    values: Dict[str, Any]

    def _bad(self, name: str, wanted: str, fix: str = "see docs/agent-protocol.md") -> AgentError:
        got = f"got {self.values[name]!r:.80}" if name in self.values else "it is missing"
        return AgentError(
            "request",
            f"{name} must be {wanted}: {got}",
            f"request {self.op}",
            fix,
            ExitCode.USAGE,
        )

    def text(self, name: str) -> str:
        value = self.values.get(name)
        if not isinstance(value, str) or not value or "\0" in value:
            raise self._bad(name, "a non-empty string")
        return value

    def optional_text(self, name: str) -> Optional[str]:
        return None if self.values.get(name) is None else self.text(name)

    def _matching(self, name: str, pattern: "re.Pattern[str]", wanted: str) -> str:
        value = self.text(name)
        if not pattern.fullmatch(value):
            raise self._bad(name, wanted)
        return value

    def digest(self, name: str = "digest") -> str:
        return self._matching(name, DIGEST, "64 lower-case hex digits")

    def optional_digest(self, name: str) -> Optional[str]:
        return None if self.values.get(name) is None else self.digest(name)

    def module(self) -> str:
        return self._matching("module", _MODULE, "the dotted name of a Python module")

    def new_run(self) -> str:
        return self._run("run")

    def _run(self, name: str) -> str:
        value = self.values.get(name)
        if isinstance(value, str) and RUN_NAME.fullmatch(value):
            return value
        # a person may have typed it
        raise self._bad(name, "letters, digits, '.', '_' or '-' (at most 100)", "their names: dflash-ops runs")

    def optional_run(self, name: str = "run") -> Optional[str]:
        return None if self.values.get(name) is None else self._run(name)

    def size(self, name: str, default: Optional[int] = None) -> int:
        value = self.values.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise self._bad(name, "a whole number, zero or more")
        return value

    def seconds(self, name: str, default: Optional[float] = None) -> float:
        value = self.values.get(name)
        value = default if value is None else value
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < float("inf"):
            raise self._bad(name, "a number of seconds, zero or more")
        return float(value)

    def flag(self, name: str) -> bool:
        value = self.values.get(name, False)
        if not isinstance(value, bool):
            raise self._bad(name, "true or false")
        return value

    def names(self, name: str) -> List[str]:
        """A list of names: of files or runs, nothing that leads elsewhere."""
        value = self.values.get(name)
        if not isinstance(value, list) or not all(isinstance(one, str) and _NAME.fullmatch(one) for one in value):
            raise self._bad(name, "a list of names")
        return value

    def table(self, name: str) -> Dict[str, Any]:
        value = self.values.get(name)
        if not isinstance(value, dict):
            raise self._bad(name, "an object")
        return value

    def optional_table(self, name: str) -> Dict[str, Any]:
        return {} if self.values.get(name) is None else self.table(name)
