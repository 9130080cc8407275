"""Requests that are begun when they arrive, and answered in their turn."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from functools import partial
from pathlib import PurePath
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple, Union, cast

from .arguments import DIGEST
from .beside import beside
from .conversation import Conversation
from .frames import LOG_STREAM
from .workdir import WorkDir

Request = Dict[str, Any]
_OF_A_RELEASE = ("syntax", "check")
Identity = Optional[Tuple[int, int]]


class Aside:
    """The conversation, for a request whose turn has not come: what it says is kept until then."""

    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation
        self._saying = threading.Lock()
        self._kept: Optional[List[Callable[[], None]]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._conversation, name)

    def data(self, data: Union[bytes, memoryview], stream: int = LOG_STREAM) -> None:
        self._say(partial(self._conversation.data, bytes(data), stream))

    def event(self, name: str, **fields: Any) -> None:
        self._say(partial(self._conversation.event, name, **fields))

    def _say(self, words: Callable[[], None]) -> None:
        with self._saying:
            if self._kept is None:
                words()
            else:
                self._kept.append(words)

    def take_turn(self) -> None:
        with self._saying:
            for words in self._kept or []:
                words()
            self._kept = None


class _Begun(NamedTuple):
    result: Callable[[], Any]
    aside: Aside
    release: Identity
    """The folder that it looked at; None where it looks at no release."""


class Early:
    """`probe`, `syntax` and `check` change nothing, and take as long as all that a deploy asks before them.

    Not in a managed environment, which may be made before their turn, nor of a release that is not there yet.
    """

    def __init__(self, conversation: Conversation, answer: Callable[[Conversation, Request], Any]) -> None:
        self._conversation = conversation
        self._work: WorkDir = conversation.work
        self._answer = answer
        self._begun: Dict[int, _Begun] = {}

    def arrived(self, payload: bytes) -> None:
        """Called in the thread that reads. What is wrong with a request is told in its turn."""
        with contextlib.suppress(ValueError, RecursionError):
            request = json.loads(payload.decode())
            if isinstance(request, dict) and isinstance(request.get("id"), int) and self._may_begin(request):
                aside = Aside(self._conversation)
                release = self._release(request)
                result = beside(lambda: self._answer(cast(Conversation, aside), request))
                self._begun[request["id"]] = _Begun(result, aside, release)

    def _may_begin(self, request: Request) -> bool:
        python, op = request.get("python"), request.get("op")
        if not isinstance(python, str) or self._work.envs in PurePath(python).parents:
            return False
        return op == "probe" or (op in _OF_A_RELEASE and self._release(request) is not None)

    def _release(self, request: Request) -> Identity:
        """Which folder the release is now: one that was changed on the host is staged anew before their turn."""
        digest = request.get("digest")
        if request["op"] not in _OF_A_RELEASE or not isinstance(digest, str) or not DIGEST.fullmatch(digest):
            return None
        try:
            status = os.stat(self._work.release(digest))
        except OSError:
            return None
        return status.st_dev, status.st_ino

    def answer(self, request: Request) -> Any:
        begun = self._begun.pop(request["id"], None) if isinstance(request.get("id"), int) else None
        if begun is None or begun.release != self._release(request):
            return self._answer(self._conversation, request)
        begun.aside.take_turn()
        return begun.result()
