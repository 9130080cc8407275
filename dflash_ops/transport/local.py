"""The machine in front of you: the agent is a child process in a session of its own, so Ctrl-C never reaches it."""

from __future__ import annotations

import contextlib
import fcntl
import subprocess
from collections.abc import Sequence

from dflash_ops.errors import ExitCode, OpsError, TransportError
from dflash_ops.transport.tail import StreamTail

CLOSING_S = 30.0
"""The agent kills what it started, which may take 5 s on its own, and lets go of the lock."""
ABANDONED_S = 5.0
_F_SETPIPE_SZ = 1031
"""Linux only: elsewhere it is refused."""
PIPE_BYTES = 1 << 20
"""Of what it says: the usual 64 KiB cost a change of threads and processes each."""


class LocalChannel:
    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        if process.stdin is None or process.stdout is None or process.stderr is None:
            raise ValueError("a channel needs all three pipes")
        self._process = process
        self._stdin = process.stdin
        self._stdout = process.stdout
        with contextlib.suppress(OSError):
            # a user may have used up what all pipes may hold together
            fcntl.fcntl(process.stdout, _F_SETPIPE_SZ, PIPE_BYTES)
        self._tail = StreamTail(process.stderr.read, "local-stderr")

    def read(self, size: int) -> bytes:
        return self._stdout.read(size)

    def write(self, data: bytes) -> None:
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[self._stdin.write(rest) :]
        except (OSError, ValueError) as error:
            raise TransportError("the agent's process ended", where="local", lost=True) from error

    def stderr(self) -> str:
        return self._tail.text()

    def wait(self, timeout: float) -> int | None:
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None

    def close(self) -> None:
        self._end(CLOSING_S)

    def abandon(self) -> None:
        self._end(ABANDONED_S)

    def _end(self, patience_s: float) -> None:
        self._stdin.close()
        if self.wait(patience_s) is None:
            self._process.kill()
            self._process.wait()


class LocalTransport:
    name = "local"
    pusher = None

    def open(self, argv: Sequence[str]) -> LocalChannel:
        try:
            process = subprocess.Popen(
                list(argv),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                # unbuffered: `close` must not wait for a writer that hangs on a frozen agent
                bufsize=0,
                start_new_session=True,
                cwd="/",
            )
        except OSError as error:
            raise OpsError(
                f"cannot run {argv[0]}: {error.strerror}",
                exit_code=ExitCode.BLOCKED,
                kind="python_missing",
                where="this machine",
                fix="name a Python that exists as `python` in the inventory",
            ) from error
        return LocalChannel(process)

    def explain(self, status: int | None, stdout: str, stderr: str) -> OpsError | None:
        return None

    def broke(self) -> TransportError | None:
        return None

    def close(self) -> None:
        return None
