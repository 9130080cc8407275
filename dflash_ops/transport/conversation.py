"""One conversation with the agent: start it, speak frames, notice a dead peer (docs/agent-protocol.md)."""

from __future__ import annotations

import json
import queue
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType, TracebackType
from typing import Any, Protocol

from dflash_ops.agent.bootstrap import BOOTSTRAP, READY, REFUSED
from dflash_ops.agent.bundle import agent_bundle
from dflash_ops.agent.frames import (
    BEAT,
    DATA,
    JSON,
    LOG_STREAM,
    MISSED_BEATS,
    Frame,
    FrameError,
    FrameReader,
    encode_frame,
    head_of_data,
)
from dflash_ops.errors import ExitCode, OpsError, TransportError
from dflash_ops.transport.base import Channel, Transport
from dflash_ops.transport.messages import nonsense, parse_message

BEAT_S = 5.0
START_TIMEOUT_S = 60.0
ENDING_S = 10.0
"""A program that closed its output has ended, and its exit status is on the way."""
CHUNK_BYTES = 256 * 1024
QUEUED_FRAMES = 64

OnEvent = Callable[[dict[str, Any]], None]
OnData = Callable[[int, bytes], None]


class Bytes(Protocol):
    """What is uploaded: bytes in memory, or a file as large as it may be, of which slices are taken."""

    def __getitem__(self, part: slice, /) -> bytes: ...


@dataclass
class _Asked:
    """A request that was sent. What comes for it before anyone waits for it is held."""

    number: int
    upload: Bytes
    on_event: OnEvent | None = None
    on_data: OnData | None = None
    waited_for: bool = False
    held: list[dict[str, Any] | Frame] = field(default_factory=list)
    answer: dict[str, Any] | None = None

    def take(self, item: dict[str, Any] | Frame) -> None:
        if not self.waited_for:
            self.held.append(item)
        elif isinstance(item, Frame):
            if self.on_data is not None:
                self.on_data(item.stream, item.payload)
        elif self.on_event is not None:
            self.on_event(item)


class Conversation:
    """The agent answers one request after the other. Use as a context manager: leaving it ends the agent and releases
    what it held.

    Nothing waits for the agent to start: the first answer does, and then whatever kept it from starting is raised.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        python: str,
        workdir: str,
        host: str,
        beat: float = BEAT_S,
        on_start: Callable[[], None] = lambda: None,
    ) -> None:
        self._host = host
        self._beat = beat
        self._python = python
        self._transport = transport
        self._on_start = on_start
        self._next_id = 1
        self._asked: deque[_Asked] = deque()
        self._ahead: list[tuple[str, _Asked]] = []
        self._write_lock = threading.Lock()
        self._frames: queue.Queue[Frame | OpsError] = queue.Queue(QUEUED_FRAMES)
        self._closing = threading.Event()
        self._broken = False
        self._listening = self._dead = False
        words = f"no sign of life from the agent for {MISSED_BEATS * beat:g} s"
        self._silence = TransportError(words, where=host, lost=True)
        self.started = False
        """Whether the agent has spoken."""
        self.moved = False
        """Whether bytes of a log or a file have come or gone: a link that moves nothing is not worth many tries."""
        self.greeting = ""
        """What was printed there before the agent spoke."""
        self._nonce = secrets.token_hex(16)
        self._channel = self._open(workdir)
        self._heard = time.monotonic()
        threading.Thread(target=self._send_beats, name="agent-beats", daemon=True).start()

    def __enter__(self) -> Conversation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def alive(self) -> bool:
        """Whether another request may be answered: as far as anyone knows here."""
        return not (self._broken or self._dead or self._closing.is_set())

    def close(self) -> None:
        self._closing.set()
        self._channel.close()

    def request(
        self,
        op: str,
        arguments: Mapping[str, object] = MappingProxyType({}),
        *,
        on_event: OnEvent | None = None,
        on_data: OnData | None = None,
        upload: Bytes = b"",
    ) -> dict[str, Any]:
        """Sends one request, unless it was sent `ahead`, and returns its result.

        `upload` is sent when the agent's `need` event asks for bytes.
        Raises OpsError with the agent's own words, TransportError when the link breaks, or what ran there is gone.
        """
        try:
            return self._requested(op, arguments, on_event, on_data, upload)
        except TransportError as error:
            known = self._transport.broke() if error.lost and self.started and not self._closing.is_set() else None
            if known is not None:
                raise known from error
            raise

    def _requested(
        self,
        op: str,
        arguments: Mapping[str, object],
        on_event: OnEvent | None,
        on_data: OnData | None,
        upload: Bytes,
    ) -> dict[str, Any]:
        asked = self._sent_ahead(op, arguments) or self._ask(op, arguments, upload, after=None)
        asked.on_event, asked.on_data, asked.waited_for = on_event, on_data, True
        held, asked.held = asked.held, []
        for item in held:
            asked.take(item)
        while asked.answer is None:
            self._dispatch(self._next_frame())
        if asked.answer.get("ok"):
            result: dict[str, Any] = asked.answer["result"]
            return result
        raise OpsError.from_agent(asked.answer["error"], self._host)

    def ahead(self, op: str, arguments: Mapping[str, object] = MappingProxyType({}), *, upload: Bytes = b"") -> None:
        """Sends a request now that `request` will be called with: then its answer is already on the way.

        It saves a round trip. The agent skips it unless the one sent ahead before it succeeded.
        """
        after = self._ahead[-1][1].number if self._ahead else None
        self._ahead.append((_words(op, arguments), self._ask(op, arguments, upload, after=after)))

    def _sent_ahead(self, op: str, arguments: Mapping[str, object]) -> _Asked | None:
        words = _words(op, arguments)
        for index, (those, asked) in enumerate(self._ahead):
            if those == words:
                del self._ahead[index]
                return asked
        return None

    def _ask(self, op: str, arguments: Mapping[str, object], upload: Bytes, *, after: int | None) -> _Asked:
        asked = _Asked(self._next_id, upload)
        self._next_id += 1
        order = {} if after is None else {"after": after}
        try:
            self._send(encode_frame(JSON, json.dumps({"id": asked.number, "op": op, **order, **arguments}).encode()))
        except TransportError:
            if self.started:
                raise
            # it ended before it read us: what it printed says why, and the first answer tells
        self._asked.append(asked)
        return asked

    def _dispatch(self, frame: Frame) -> None:
        """Data frames name no request: they are of the one that is being answered, the oldest."""
        if frame.kind == DATA:
            self.moved = True
            if self._asked:
                self._asked[0].take(frame)
            return
        message = parse_message(frame.payload, self._host)
        if message.get("id") is None and "error" in message:
            raise OpsError.from_agent(message["error"], self._host)
        asked = next((one for one in self._asked if one.number == message["id"]), None)
        if asked is None:
            return
        if "event" in message:
            if message["event"] == "need":
                start, size = (message.get(key) for key in ("from", "bytes"))
                if not isinstance(start, int) or not isinstance(size, int) or min(start, size) < 0:
                    raise nonsense("a need without numbers", self._host)
                self._upload(asked.upload, start, size)
            asked.take(message)
        else:
            asked.answer = message
            self._asked.remove(asked)

    def _upload(self, data: Bytes, start: int, size: int) -> None:
        for first in range(start, start + size, CHUNK_BYTES):
            if not self._frames.empty():
                # the agent only speaks during an upload to refuse it
                return
            piece = data[first : min(first + CHUNK_BYTES, start + size)]
            if not piece:
                # more was asked for than there is
                return
            self._send(b"".join((head_of_data(LOG_STREAM, len(piece)), piece)))
            self.moved = True

    def _next_frame(self) -> Frame:
        if not self.started:
            self._await_sentinel()
            self.started = True
            self._heard = time.monotonic()
            threading.Thread(target=self._read_frames, name="agent-frames", daemon=True).start()
            self._on_start()
        while True:
            try:
                item = self._frames.get(timeout=self._beat / 4)
            except queue.Empty:
                if self._silent():
                    self._channel.abandon()
                    raise self._silence from None
                continue
            if isinstance(item, OpsError):
                # it stays broken for whoever asks next
                self._frames.put(item)
                raise item
            return item

    def _read_frames(self) -> None:
        reader = FrameReader(self._channel)
        try:
            while True:
                self._listening = True
                frame = reader.read()
                self._listening = False
                self._heard = time.monotonic()
                if frame is None:
                    raise TransportError("the agent ended the conversation", where=self._host, lost=True)
                if frame.kind == BEAT:
                    continue
                self._frames.put(frame)
                # the queue may have been full for long: that was our slowness, not the peer's silence
                self._heard = time.monotonic()
        except OpsError as error:
            self._end(error)
        except (FrameError, OSError, ValueError) as error:
            self._end(TransportError(f"the agent's frames broke off: {error}", where=self._host, lost=True))

    def _end(self, error: OpsError) -> None:
        self._broken = True
        self._frames.put(self._silence if self._dead else error)

    def _send_beats(self) -> None:
        while not self._closing.wait(self._beat):
            if self._listening and self._silent():
                # whoever is stuck in a write to a dead peer learns it so
                self._dead = True
                self._channel.abandon()
                return
            if not self._write_lock.acquire(blocking=False):
                # what is being written is a sign of life too
                continue
            try:
                self._channel.write(encode_frame(BEAT))
            except OpsError:
                return
            finally:
                self._write_lock.release()

    def _silent(self) -> bool:
        return time.monotonic() - self._heard > MISSED_BEATS * self._beat

    def _send(self, frame: bytes) -> None:
        try:
            with self._write_lock:
                self._channel.write(frame)
        except TransportError as error:
            raise self._last_words(self._silence if self._dead else error) from None

    def _last_words(self, error: TransportError) -> OpsError:
        """Why the agent went, where it has told; else `error`."""
        if not self.started:
            return error
        try:
            while True:
                frame = self._next_frame()
                message = {} if frame.kind == DATA else parse_message(frame.payload, self._host)
                number = message.get("id")
                if "error" in message and (number is None or any(one.number == number for one in self._asked)):
                    return OpsError.from_agent(message["error"], self._host)
        except TransportError:
            # it had nothing more to say
            return error

    def _open(self, workdir: str) -> Channel:
        agent, digest = agent_bundle()
        argv = [
            self._python,
            "-I",
            # of the installed packages, and of what they do at every start, an agent needs nothing
            "-S",
            "-c",
            BOOTSTRAP,
            self._nonce,
            str(len(agent)),
            digest,
            workdir,
            "--beat",
            str(self._beat),
        ]
        channel = self._transport.open(argv)
        try:
            channel.write(agent)
        except TransportError:
            # it ended before it read us: what it printed says why
            pass
        except BaseException:
            channel.close()
            raise
        return channel

    def _await_sentinel(self) -> None:
        ready = f"\n{READY} {self._nonce}\n".encode()
        refused = f"\n{REFUSED} {self._nonce} ".encode()
        watchdog = threading.Timer(START_TIMEOUT_S, self._channel.close)
        watchdog.start()
        seen = b"\n"
        try:
            while True:
                byte = self._channel.read(1)
                if not byte:
                    break
                seen = (seen + byte)[-65536:]
                if seen.endswith(ready):
                    self.greeting = seen[: -len(ready)].decode("utf-8", "replace")
                    return
                if byte == b"\n" and refused in seen:
                    words = seen[seen.index(refused) + len(refused) :].decode("utf-8", "replace").strip()
                    raise OpsError.from_agent(parse_message(f'{{"error": {words}}}', self._host)["error"], self._host)
        finally:
            watchdog.cancel()
        raise self._start_failure(seen.decode("utf-8", "replace"))

    def _start_failure(self, stdout: str) -> OpsError:
        status = self._channel.wait(ENDING_S)
        stderr = self._channel.stderr()
        known = self._transport.explain(status, stdout, stderr)
        if known is not None:
            return known
        if status is None or status < 0:
            # a program that cannot be run has an exit status
            return TransportError("the link broke while the agent started", where=self._host, lost=True)
        words = (stderr.strip() or stdout.strip()).splitlines()
        said = words[-1] if words else "nothing was printed"
        if not words or status in (126, 127) or "No such file or directory" in stderr or "not found" in stderr:
            return OpsError(
                f"cannot run {self._python} there: {said}",
                exit_code=ExitCode.BLOCKED,
                kind="python_missing",
                where=self._host,
                fix="install Python 3.9 or newer there, or name its path as `python` in the inventory",
            )
        return TransportError(
            f"the agent did not start (status {status}): {said}",
            where=self._host,
            fix=f"the login shell there must not need a terminal, and must pass commands on; {self._python} must be a "
            "Python of 3.9 or newer",
        )


def _words(op: str, arguments: Mapping[str, object]) -> str:
    return json.dumps([op, dict(arguments)], sort_keys=True)
