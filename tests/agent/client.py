"""A client of the wire for these tests, written from docs/agent-protocol.md: it drives a real agent over pipes."""

from __future__ import annotations

import atexit
import contextlib
import functools
import gzip
import hashlib
import io
import json
import secrets
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import venv
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash_ops.agent.bootstrap import BOOTSTRAP, READY, REFUSED
from dflash_ops.agent.bundle import agent_bundle
from dflash_ops.agent.frames import BEAT, DATA, JSON, Frame, FrameReader, encode_data, encode_frame

BEAT_S = 5.0
"""So long that a machine which stands still for seconds ends no conversation."""
SILENT_S = 2.0
"""The beat where a test waits until an agent has missed three: as short as a busy machine lets it be."""
PATIENCE_S = 240.0
"""A bound for what hangs; nothing is judged by time."""
TRAINER = (Path(__file__).parent / "trivial_trainer.py").read_text()


class AgentFailed(Exception):
    """The agent's error reply."""

    def __init__(self, error: dict[str, Any]) -> None:
        super().__init__(f"{error['kind']}: {error['what']}")
        self.error = error
        self.kind, self.what, self.exit = error["kind"], error["what"], error["exit"]


@dataclass
class Reply:
    result: Any
    events: list[dict[str, Any]] = field(default_factory=list)
    streams: dict[int, bytes] = field(default_factory=lambda: {0: b"", 1: b""})

    @property
    def log(self) -> str:
        return self.streams[0].decode()


class Agent:
    """One conversation, its heartbeats in a thread."""

    def __init__(
        self,
        workdir: Path,
        *,
        python: str = sys.executable,
        beat: float = BEAT_S,
        wrap: Callable[[list[str]], list[str]] = lambda argv: argv,
        environment: dict[str, str] | None = None,
    ) -> None:
        data, digest = agent_bundle()
        self.nonce = secrets.token_hex(8)
        argv = [
            python,
            "-I",
            "-S",
            "-c",
            BOOTSTRAP,
            self.nonce,
            str(len(data)),
            digest,
            str(workdir),
            "--beat",
            str(beat),
        ]
        self.process = subprocess.Popen(
            wrap(argv), stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, env=environment
        )
        self._ids = 0
        self._sending = threading.Lock()
        self._stop = threading.Event()
        # torn on purpose: the agent arrives in two parts, the second with the first frame behind it
        self.send(data[:1000])
        self.send(data[1000:] + encode_frame(BEAT))
        self.noise = self._find_ready()
        self._reader = FrameReader(self.process.stdout)
        threading.Thread(target=self._beat, args=(beat / 3,), daemon=True).start()

    def _find_ready(self) -> bytes:
        ready, refused, seen = f"\n{READY} {self.nonce}\n".encode(), f"\n{REFUSED} {self.nonce} ".encode(), b""
        while not seen.endswith(ready):
            byte = self.process.stdout.read(1)
            if not byte:
                raise AssertionError(f"the agent ended before it began: {seen!r}")
            seen += byte
            if refused in seen and byte == b"\n" and not seen.endswith(refused):
                raise AgentFailed(json.loads(seen.split(refused)[1]))
        return seen[: -len(ready)]

    def _beat(self, pause: float) -> None:
        while not self._stop.wait(pause):
            with contextlib.suppress(OSError, ValueError):
                self.send(encode_frame(BEAT))

    def fall_silent(self) -> None:
        """As a laptop that sleeps: the pipe stays open and nothing is said."""
        self._stop.set()

    def send(self, data: bytes) -> None:
        with self._sending:
            rest = memoryview(data)
            while rest:
                rest = rest[self.process.stdin.write(rest) :]

    def ask(self, op: str, **arguments: Any) -> int:
        self._ids += 1
        self.send(encode_frame(JSON, json.dumps({"id": self._ids, "op": op, **arguments}).encode()))
        return self._ids

    def frame(self) -> Frame:
        """The next frame that is no heartbeat."""
        while True:
            frame = self._reader.read()
            assert frame is not None, "the agent ended the conversation"
            if frame.kind != BEAT:
                return frame

    def reply(self, number: int, upload: bytes = b"", seen: Callable[[Reply], None] = lambda reply: None) -> Reply:
        """All until the answer; `seen` is called after each frame with what has come so far."""
        reply = Reply(None)
        while True:
            kind, payload, stream = self.frame()
            if kind == DATA:
                reply.streams[stream] += payload
                seen(reply)
                continue
            message = json.loads(payload)
            assert message["id"] == number
            if "event" in message:
                reply.events.append(message)
                if message["event"] == "need" and message["bytes"]:
                    part = upload[message["from"] :]
                    assert message["bytes"] == len(part)
                    for start in range(0, len(part), 1000):
                        self.send(encode_data(0, part[start : start + 1000]))
                seen(reply)
            elif message["ok"]:
                reply.result = message["result"]
                return reply
            else:
                raise AgentFailed(message["error"])

    def call(self, op: str, *, upload: bytes = b"", **arguments: Any) -> Reply:
        return self.reply(self.ask(op, **arguments), upload)

    def close(self) -> None:
        """Closes our end and waits for the agent to be gone."""
        self._stop.set()
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        self.process.wait(timeout=PATIENCE_S)
        self.process.stdout.close()

    def __enter__(self) -> Agent:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True)
class Packed:
    digest: str
    archive: bytes


def manifest_of(files: dict[str, bytes], executable: frozenset[str] = frozenset()) -> tuple[str, dict[str, Any]]:
    listed = [
        {
            "path": path,
            "size": len(data),
            "sha256": hashlib.sha256(data).hexdigest(),
            "mode": 0o755 if path in executable else 0o644,
        }
        for path, data in sorted(files.items())
    ]
    digest = hashlib.sha256(json.dumps(listed, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    return digest, {"v": 1, "digest": digest, "files": listed}


def member(name: str, data: bytes = b"", mode: int = 0o644, **changes: Any) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(data), mode
    for key, value in changes.items():
        setattr(info, key, value)
    return info, data


def tar_of(members: list[tuple[tarfile.TarInfo, bytes]]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for info, data in members:
            tar.addfile(info, io.BytesIO(data))
    return gzip.compress(buffer.getvalue(), mtime=0)


def pack(files: dict[str, bytes], executable: frozenset[str] = frozenset()) -> Packed:
    digest, manifest = manifest_of(files, executable)
    members = [member("manifest.json", json.dumps(manifest).encode())]
    members += [member(path, data, 0o755 if path in executable else 0o644) for path, data in files.items()]
    return Packed(digest, tar_of(members))


def trainer_release(**more: str) -> Packed:
    files = {"tt/__init__.py": b"", "tt/__main__.py": TRAINER.encode()}
    return pack({**files, **{path: text.encode() for path, text in more.items()}})


@functools.cache
def bare_python() -> str:
    """A Python with nothing installed: its packages are listed in no time."""
    folder = tempfile.TemporaryDirectory(prefix="bare-python-")
    atexit.register(folder.cleanup)
    venv.create(folder.name, with_pip=False, symlinks=True)
    return f"{folder.name}/bin/python"


def job(release: Packed, *, python: str | None = None, **act: Any) -> dict[str, Any]:
    """The arguments that check, prepare, canary, verdict and launch share."""
    python = python or bare_python()
    settings = {"workload": {"require_cuda": False, "threads": 2}, "training": {"act": act}}
    return {"digest": release.digest, "module": "tt", "python": python, "settings": settings, "playbook": "trivial"}


def eventually(what: Callable[[], Any]) -> Any:
    until = time.monotonic() + PATIENCE_S
    while True:
        value = what()
        if value:
            return value
        assert time.monotonic() < until, "it did not happen in time"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"
