"""One conversation with the agent: start it, speak frames, notice a dead peer (docs/agent-protocol.md)."""

from __future__ import annotations

import json
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

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
    encode_data,
    encode_frame,
)
from dflash_ops.errors import ExitCode, OpsError, TransportError
from dflash_ops.transport.base import Channel, Transport
from dflash_ops.transport.messages import parse_message

BEAT_S = 5.0
START_TIMEOUT_S = 60.0
CHUNK_BYTES = 256 * 1024
QUEUED_FRAMES = 64

OnEvent = Callable[[dict[str, Any]], None]
OnData = Callable[[int, bytes], None]


class Conversation:
    """Requests go one at a time. Use as a context manager: leaving it ends the agent and releases what it held."""

    def __init__(self, transport: Transport, *, python: str, workdir: str, host: str, beat: float = BEAT_S) -> None:
        self._host = host
        self._beat = beat
        self._next_id = 1
        self._write_lock = threading.Lock()
        self._frames: queue.Queue[Frame | OpsError] = queue.Queue(QUEUED_FRAMES)
        self._closing = threading.Event()
        self.moved = False
        """Whether bytes of a log or a file have come or gone: a link that moves nothing is not worth many tries."""
        self._channel = self._start(transport, python, workdir)
        self._heard = time.monotonic()
        threading.Thread(target=self._read_frames, name="agent-frames", daemon=True).start()
        threading.Thread(target=self._send_beats, name="agent-beats", daemon=True).start()

    def __enter__(self) -> Conversation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

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
        upload: Path | None = None,
    ) -> dict[str, Any]:
        """Sends one request and returns its result.

        `upload` is sent when the agent's `need` event asks for bytes.
        Raises OpsError with the agent's own words, TransportError when the link breaks.
        """
        number, self._next_id = self._next_id, self._next_id + 1
        self._send(encode_frame(JSON, json.dumps({"id": number, "op": op, **arguments}).encode()))
        for message in self._messages(number, on_data):
            if "event" in message:
                if message["event"] == "need" and message.get("bytes") and upload is not None:
                    self._upload(upload)
                if on_event is not None:
                    on_event(message)
            elif message.get("ok"):
                result: dict[str, Any] = message["result"]
                return result
            else:
                raise OpsError.from_agent(message["error"], self._host)
        raise AssertionError("unreachable: _messages ends by raising")

    def _messages(self, number: int, on_data: OnData | None) -> Iterator[dict[str, Any]]:
        while True:
            frame = self._next_frame()
            if frame.kind == DATA:
                self.moved = True
                if on_data is not None:
                    on_data(*frame.split_data())
                continue
            message = parse_message(frame.payload, self._host)
            if message.get("id") == number:
                yield message

    def _upload(self, path: Path) -> None:
        with path.open("rb") as source:
            while chunk := source.read(CHUNK_BYTES):
                if not self._frames.empty():
                    # the agent only speaks during an upload to refuse it
                    return
                self._send(encode_data(LOG_STREAM, chunk))
                self.moved = True

    def _next_frame(self) -> Frame:
        while True:
            try:
                item = self._frames.get(timeout=self._beat / 4)
            except queue.Empty:
                if time.monotonic() - self._heard > MISSED_BEATS * self._beat:
                    raise TransportError(
                        f"no sign of life from the agent for {MISSED_BEATS * self._beat:.0f} s",
                        where=self._host,
                        lost=True,
                    ) from None
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
                frame = reader.read()
                self._heard = time.monotonic()
                if frame is None:
                    raise TransportError("the agent ended the conversation", where=self._host, lost=True)
                if frame.kind == BEAT:
                    continue
                self._frames.put(frame)
                # the queue may have been full for long: that was our slowness, not the peer's silence
                self._heard = time.monotonic()
        except OpsError as error:
            self._frames.put(error)
        except (FrameError, OSError, ValueError) as error:
            self._frames.put(TransportError(f"the agent's frames broke off: {error}", where=self._host, lost=True))

    def _send_beats(self) -> None:
        while not self._closing.wait(self._beat):
            try:
                self._send(encode_frame(BEAT))
            except OpsError:
                return

    def _send(self, frame: bytes) -> None:
        with self._write_lock:
            self._channel.write(frame)

    def _start(self, transport: Transport, python: str, workdir: str) -> Channel:
        agent, digest = agent_bundle()
        nonce = secrets.token_hex(16)
        argv = [
            python,
            "-I",
            "-c",
            BOOTSTRAP,
            nonce,
            str(len(agent)),
            digest,
            workdir,
            "--beat",
            str(self._beat),
        ]
        channel = transport.open(argv)
        try:
            try:
                channel.write(agent)
            except TransportError:
                # it ended before it read us: what it printed says why
                pass
            self._await_sentinel(channel, transport, nonce, python)
        except BaseException:
            channel.close()
            raise
        return channel

    def _await_sentinel(self, channel: Channel, transport: Transport, nonce: str, python: str) -> None:
        ready = f"\n{READY} {nonce}\n".encode()
        refused = f"\n{REFUSED} {nonce} ".encode()
        watchdog = threading.Timer(START_TIMEOUT_S, channel.close)
        watchdog.start()
        seen = b"\n"
        try:
            while True:
                byte = channel.read(1)
                if not byte:
                    break
                seen = (seen + byte)[-65536:]
                if seen.endswith(ready):
                    return
                if byte == b"\n" and refused in seen:
                    words = seen[seen.index(refused) + len(refused) :].decode("utf-8", "replace").strip()
                    raise OpsError.from_agent(parse_message(f'{{"error": {words}}}', self._host)["error"], self._host)
        finally:
            watchdog.cancel()
        raise self._start_failure(channel, transport, seen.decode("utf-8", "replace"), python)

    def _start_failure(self, channel: Channel, transport: Transport, stdout: str, python: str) -> OpsError:
        status = channel.wait(2)
        stderr = channel.stderr()
        known = transport.explain(status, stdout, stderr)
        if known is not None:
            return known
        words = (stderr.strip() or stdout.strip()).splitlines()
        said = words[-1] if words else "nothing was printed"
        if not words or status in (126, 127) or "No such file or directory" in stderr or "not found" in stderr:
            return OpsError(
                f"cannot run {python} there: {said}",
                exit_code=ExitCode.BLOCKED,
                kind="python_missing",
                where=self._host,
                fix="install Python 3.9 or newer there, or name its path as `python` in the inventory",
            )
        return TransportError(
            f"the agent did not start (status {status}): {said}",
            where=self._host,
            fix="the login shell there must not need a terminal, and must pass commands on",
        )
