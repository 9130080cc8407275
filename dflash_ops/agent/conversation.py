"""One client, one conversation: its threads, its frames, and what must be undone when the client is gone."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import queue
import select
import threading
from collections import deque
from typing import Any, Callable, Deque, Dict, Iterator, Optional, Set, Union

from .errors import AgentError, ClientGone, ExitCode
from .frames import (
    BEAT,
    DATA,
    JSON,
    LOG_STREAM,
    MISSED_BEATS,
    Frame,
    FrameDecoder,
    FrameError,
    encode_frame,
    head_of_data,
)
from .leftovers import clear_leftovers
from .lock import Lock, Owner
from .masking import Masks
from .orphans import clear_orphans
from .workdir import WorkDir

_READ_SIZE = 256 * 1024
_FRAMES_WAITING = 32
# for a client that does not read
_LAST_WORDS_S = 2.0


class Conversation:
    """Reads frames in a thread of its own, so that a client that is gone is noticed whatever else goes on.

    When it is gone, everything registered with `until_gone` or `started` is undone, newest first, and the process
    exits. Runs are never registered.
    """

    def __init__(self, source: int, sink: int, work: WorkDir, beat_s: float, agent_file: str) -> None:
        self.work = work
        self.beat_s = beat_s
        self.agent_file = agent_file
        self.lock = Lock(work, beat_s)
        self.arrived: Callable[[bytes], None] = lambda payload: None
        """Told every request when it has come, in the thread that reads."""
        self._source = source
        self._sink = sink
        self._request: Any = None
        self._failed: Set[int] = set()
        self._put_aside: Deque[Frame] = deque()
        self._frames: "queue.Queue[Frame]" = queue.Queue(maxsize=_FRAMES_WAITING)
        self._sending = threading.Lock()
        self._guard = threading.RLock()
        self._undo: Dict[int, Callable[[], None]] = {}
        self._numbers = itertools.count()
        self._lock_undo: Optional[int] = None
        self._closed = False
        self._masks = Masks()
        self._hiding = threading.Lock()

    def start_threads(self) -> None:
        for name, target in (("reader", self._read), ("heart", self._beat)):
            threading.Thread(target=target, name=name, daemon=True).start()

    # ---- what the client sends

    def _read(self) -> None:
        decoder = FrameDecoder()
        patience = MISSED_BEATS * self.beat_s
        while True:
            # the wait is measured here: while we are the slow side (a full queue) no beat counts as missed
            if not select.select([self._source], [], [], patience)[0]:
                self.close(f"no frame from the client for {patience:g} s")
            data = os.read(self._source, _READ_SIZE)
            if not data:
                self.close("the client closed the conversation")
            try:
                for frame in decoder.feed(data):
                    if frame.kind == JSON:
                        self.arrived(frame.payload)
                    if frame.kind != BEAT:
                        self._frames.put(frame)
            except FrameError as error:
                with contextlib.suppress(ClientGone):
                    self._send_json({"id": None, "ok": False, "error": _protocol_error(str(error)).to_json()})
                self.close(str(error))

    def next_request(self) -> Dict[str, Any]:
        """The next request. Data frames before it belong to a request that has ended and are dropped."""
        while True:
            frame = self._put_aside.popleft() if self._put_aside else self._frames.get()
            if frame.kind != JSON:
                continue
            try:
                request = json.loads(frame.payload.decode())
            except ValueError as error:
                raise _protocol_error(f"a request is not JSON: {error}") from None
            if not isinstance(request, dict):
                raise _protocol_error("a request must be an object")
            self._request = request.get("id")
            after = request.get("after")
            if isinstance(after, int) and after in self._failed:
                self.refuse(_skipped(after))
                continue
            return request

    def upload(self, size: int) -> Iterator[bytes]:
        """Exactly `size` bytes of stream 0 from the client. Requests that were sent ahead wait meanwhile."""
        left = size
        while left > 0:
            frame = self._frames.get()
            if frame.kind != DATA:
                self._put_aside.append(frame)
                continue
            data = frame.payload
            if len(data) > left:
                raise _protocol_error(f"{len(data) - left} bytes more than the {size} announced")
            left -= len(data)
            yield data

    # ---- what we send

    def hide(self, masks: Masks) -> None:
        """From now on these secrets stand in no answer, event or error."""
        with self._hiding:
            self._masks |= masks

    def event(self, name: str, **fields: Any) -> None:
        self._send_json({"id": self._request, "event": name, **fields})

    def data(self, data: Union[bytes, memoryview], stream: int = LOG_STREAM) -> None:
        self._send(head_of_data(stream, len(data)), data)

    def answer(self, result: Any) -> None:
        request, self._request = self._request, None
        self._send_json({"id": request, "ok": True, "result": result})

    def refuse(self, error: AgentError) -> None:
        """Of the request that is at work; between two of them it is of the conversation (`id` null)."""
        request, self._request = self._request, None
        if isinstance(request, int):
            self._failed.add(request)
        self._send_json({"id": request, "ok": False, "error": error.to_json()})

    def _send_json(self, value: Dict[str, Any]) -> None:
        self._send(encode_frame(JSON, json.dumps(self._masks.value(value)).encode()))

    def _send(self, *parts: Union[bytes, memoryview]) -> None:
        """Of one frame."""
        rest = [memoryview(part) for part in parts if part]
        with self._sending:
            while rest:
                try:
                    written = os.writev(self._sink, rest)
                except OSError as error:
                    raise ClientGone(str(error)) from error
                while rest and written >= len(rest[0]):
                    written -= len(rest.pop(0))
                if written:
                    rest[0] = rest[0][written:]

    def _beat(self) -> None:
        pause = threading.Event()
        beat = encode_frame(BEAT)
        while not pause.wait(self.beat_s):
            try:
                self._send(beat)
            except ClientGone as gone:
                self.close(str(gone))

    # ---- what ends with the conversation

    @contextlib.contextmanager
    def starting(self) -> "Iterator[Callable[[Callable[[], None]], int]]":
        """While open, the conversation cannot close; yields the function that registers what undoes the start."""
        with self._guard:
            if self._closed:
                raise ClientGone("nothing new may be started")
            yield self._register

    def _register(self, undo: Callable[[], None]) -> int:
        number = next(self._numbers)
        self._undo[number] = undo
        return number

    def settle(self, number: int) -> None:
        """What was registered under this number needs no undoing any more.

        Raises ClientGone where it is being undone: how it ended is then the undoing's work, and says nothing.
        """
        with self._guard:
            if self._closed:
                raise ClientGone("what was started is undone")
            self._undo.pop(number, None)

    def take_lock(self, owner: str, command: str, *, take_from: Optional[str] = None) -> Optional[Owner]:
        """Returns whose it was before: see Lock.acquire."""
        with self.starting() as register:
            before = self.lock.acquire(owner, command, self._lock_lost, take_from=take_from)
            self._lock_undo = register(self.lock.release)
        if take_from is None:
            clear_orphans(self.work)
            clear_leftovers(self.work)
        return before

    def _lock_lost(self, why: str) -> None:
        """Tells the client, if it listens, and ends what was done under the lock."""
        self._note("lock_lost", why)
        error = AgentError(
            "lock_lost",
            f"this command lost the lock of the host: {why}",
            "lock of the host",
            "what it had started there is ended; runs go on: dflash-ops status",
            ExitCode.LOCKED,
        )
        telling = threading.Thread(target=self._refuse_quietly, args=(error,), daemon=True)
        telling.start()
        telling.join(_LAST_WORDS_S)
        self.close(why)

    def _refuse_quietly(self, error: AgentError) -> None:
        with contextlib.suppress(ClientGone):
            self.refuse(error)

    def drop_lock(self) -> None:
        """Gives the lock back before the conversation ends; it may be taken again."""
        with self._guard:
            if self._closed:
                raise ClientGone("the lock goes with the conversation")
            number, self._lock_undo = self._lock_undo, None
            if number is not None:
                self._undo.pop(number)
                self.lock.release()
                self.lock = Lock(self.work, self.beat_s)

    def close(self, reason: str, code: int = 0) -> None:
        """Undoes what the conversation started and ends the process; only the first caller gets to do it."""
        with self._guard:
            first, self._closed = not self._closed, True
        if not first:
            threading.Event().wait()
        for number in sorted(self._undo, reverse=True):
            try:
                self._undo[number]()
            except OSError as error:
                self._note("undo_failed", str(error))
        if self._undo:
            self._note("client_gone", reason)
        os._exit(code)

    def _note(self, event: str, reason: str) -> None:
        # a full disk must not keep the process alive
        with contextlib.suppress(OSError):
            self.work.record(event, reason=reason, pid=os.getpid())


def _skipped(number: int) -> AgentError:
    return AgentError(
        "skipped",
        f"request {number}, which this one was to follow, did not succeed",
        "request sent ahead",
        "see the error of that request",
        ExitCode.TRANSPORT,
    )


def _protocol_error(what: str, where: Optional[str] = None) -> AgentError:
    return AgentError(
        "protocol", what, where or "frames from the client", "use a client of the same version", ExitCode.TRANSPORT
    )
