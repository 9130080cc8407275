"""SSH: `connecting` opens the connection by fabric; the bytes flow on our own thin channel,

since `fabric.Connection.run` joins its buffers quadratically and paramiko never notices a dead peer by itself.
"""

from __future__ import annotations

import contextlib
import logging
import shlex
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from dflash_ops.errors import OpsError, TransportError
from dflash_ops.transport.connecting import close, connect
from dflash_ops.transport.intake import Pieces
from dflash_ops.transport.tail import StreamTail
from dflash_ops.transport.window import Windows, start

if TYPE_CHECKING:
    from dflash_ops.config import Ssh

STALL_TIMEOUT_S = 60.0
"""Nothing read or written for this long means a dead peer (paramiko's keepalive never tells)."""
BROKEN = (OSError, EOFError)
"""What paramiko raises in whichever call sends something (an acknowledgement of bytes read, too) once a link is cut."""
# what it logs it raises too; without a handler Python would print it, with a traceback
logging.getLogger("paramiko").addHandler(logging.NullHandler())


class SshChannel:
    def __init__(self, channel: Any, where: str) -> None:
        self._channel = channel
        self._where = where
        self._tail = StreamTail(channel.recv_stderr, "ssh-stderr")
        self._write_lock = threading.Lock()

    def read(self, size: int) -> bytes:
        try:
            data: bytes = self._channel.recv(size)
        except TimeoutError as error:
            raise self._stalled() from error
        except BROKEN as error:
            raise self._broke(error) from error
        return data

    def write(self, data: bytes) -> None:
        view = memoryview(data)
        try:
            with self._write_lock:
                while view:
                    view = view[self._channel.send(view) :]
        except TimeoutError as error:
            raise self._stalled() from error
        except BROKEN as error:
            raise self._broke(error) from error

    def _broke(self, error: BaseException) -> TransportError:
        words = f"the SSH connection broke: {error or type(error).__name__}"
        return TransportError(words, where=self._where, lost=True)

    def _stalled(self) -> TransportError:
        words = f"nothing moved for {STALL_TIMEOUT_S:.0f} s on the SSH connection"
        return TransportError(words, where=self._where, lost=True)

    def stderr(self) -> str:
        return self._tail.text()

    def wait(self, timeout: float) -> int | None:
        if not self._channel.status_event.wait(timeout):
            return None
        status: int = self._channel.recv_exit_status()
        return status if status >= 0 else None

    def finish_input(self) -> None:
        try:
            self._channel.shutdown_write()
        except BROKEN as error:
            raise self._broke(error) from error

    def close(self) -> None:
        # it says goodbye, which a cut link does not take
        with contextlib.suppress(*BROKEN):
            self._channel.close()

    def abandon(self) -> None:
        self._channel.get_transport().close()


class SshTransport:
    """One SSH connection; channels are opened on it, and it is opened again when it broke."""

    name = "ssh"
    pusher = None

    def __init__(self, ssh: Ssh, announce: Callable[[str], None]) -> None:
        self._ssh = ssh
        self._announce = announce
        self._connection: Any = None
        self._windows = Windows(None)
        self._connecting = threading.Lock()

    @property
    def where(self) -> str:
        return f"ssh {self._ssh.address}"

    def open(self, argv: Sequence[str]) -> SshChannel:
        import paramiko

        try:
            with self._connecting:
                # several conversations may begin at once
                transport, windows = self._connected(), self._windows
            asked = time.monotonic()
            channel = transport.open_session(timeout=STALL_TIMEOUT_S)
            took_s = time.monotonic() - asked
            # nothing can have come yet: no program was asked for
            channel.in_buffer = Pieces()
            channel.settimeout(STALL_TIMEOUT_S)
            start(channel, shlex.join(argv))
            windows.opened(channel, took_s)
        except (paramiko.SSHException, EOFError, OSError) as error:
            raise TransportError(f"the SSH connection broke: {error}", where=self.where, lost=True) from error
        return SshChannel(channel, self.where)

    def explain(self, status: int | None, stdout: str, stderr: str) -> OpsError | None:
        return None

    def broke(self) -> TransportError | None:
        return None

    @property
    def holds(self) -> bool:
        """Whether the connection itself is there."""
        return self._connection is not None and bool(self._connection.is_connected)

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            close(connection)

    def _connected(self) -> Any:
        if self.holds:
            return self._connection.transport
        self.close()
        self._connection = connect(self._ssh, self._announce)
        transport = self._connection.transport
        self._windows = Windows(transport)
        return transport
