"""Requests that are begun when they arrive, and answered in their turn."""

from __future__ import annotations

import contextlib
import json
from pathlib import PurePath
from typing import Any, Callable, Dict

from .beside import beside
from .workdir import WorkDir

Request = Dict[str, Any]


class Early:
    """`probe` changes nothing, and takes as long as all that a deploy asks before it.

    Not one of a managed environment: that may be made before its turn.
    """

    def __init__(self, work: WorkDir, answer: Callable[[Request], Any]) -> None:
        self._work = work
        self._answer = answer
        self._begun: Dict[int, Callable[[], Any]] = {}

    def arrived(self, payload: bytes) -> None:
        """Called in the thread that reads. What is wrong with a request is told in its turn."""
        with contextlib.suppress(ValueError, RecursionError):
            request = json.loads(payload.decode())
            if isinstance(request, dict) and isinstance(request.get("id"), int) and self._may_begin(request):
                self._begun[request["id"]] = beside(lambda: self._answer(request))

    def _may_begin(self, request: Request) -> bool:
        python = request.get("python")
        return (
            request.get("op") == "probe" and isinstance(python, str) and self._work.envs not in PurePath(python).parents
        )

    def answer(self, request: Request) -> Any:
        begun = self._begun.pop(request["id"], None) if isinstance(request.get("id"), int) else None
        return self._answer(request) if begun is None else begun()
