"""SSH: fabric resolves and opens the connection (ssh_config, agent, ProxyJump); the bytes flow on our own thin channel,

since `fabric.Connection.run` joins its buffers quadratically and paramiko never notices a dead peer by itself.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_ops.errors import OpsError, TransportError
from dflash_ops.transport.hostkeys import HostKeyMode, HostKeyPolicy, fingerprint
from dflash_ops.transport.intake import Pieces, ReadAhead
from dflash_ops.transport.tail import StreamTail
from dflash_ops.transport.window import Windows, start

if TYPE_CHECKING:
    from dflash_ops.config import Ssh

CONNECT_TIMEOUT_S = 15
SSH_PORT = 22
KNOWN_HOSTS = "~/.ssh/known_hosts"
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


def _forgetting(name: str, known_hosts: Path) -> str:
    """The command that takes a host's key away. `name`: as the file has it, which an alias is not."""
    other = known_hosts != Path(os.path.expanduser(KNOWN_HOSTS))  # noqa: PTH111
    return f"ssh-keygen -R {shlex.quote(name)}" + (f" -f {shlex.quote(str(known_hosts))}" if other else "")


def _quick_socket(host: str, port: int) -> socket.socket:
    """Small packets go at once, from the first: 48 ms a round trip with Nagle, 5 ms without."""
    made = socket.create_connection((host, port), CONNECT_TIMEOUT_S)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return made


def quick_transport() -> Any:
    """AES-GCM first, where both sides have it: paramiko's own first choice takes half as much time again a byte."""
    import paramiko

    ciphers = sorted(paramiko.Transport._preferred_ciphers, key=lambda name: "gcm" not in name)
    return type("QuickTransport", (paramiko.Transport,), {"_preferred_ciphers": tuple(ciphers)})


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
            connection.close()
            if connection.gateway is not None and hasattr(connection.gateway, "close"):
                connection.gateway.close()

    def _connected(self) -> Any:
        if self.holds:
            return self._connection.transport
        self.close()
        self._connection = self._connect()
        transport = self._connection.transport
        self._windows = Windows(transport)
        return transport

    def _connect(self) -> Any:
        import paramiko
        from fabric import Connection

        address = self._ssh.address
        connect_kwargs: dict[str, object] = {}
        if self._ssh.identity_file:
            # an unknown `~user` stays as it is: there is no such file then
            connect_kwargs["key_filename"] = os.path.expanduser(self._ssh.identity_file)  # noqa: PTH111
        connection = Connection(
            address,
            user=self._ssh.user,
            port=self._ssh.port,
            connect_timeout=CONNECT_TIMEOUT_S,
            connect_kwargs=connect_kwargs,
        )
        if str(connection.ssh_config.get("proxyjump", "")).lower() == "none":
            # fabric takes the word for a host name
            connection.gateway = None
        hops = [connection]
        while (jump := hops[-1].gateway) is not None and not isinstance(jump, str):
            hops.append(jump)
        for hop in hops:
            self._check_keys(hop, pinned=self._ssh.fingerprint if hop is connection else None)
        try:
            if connection.gateway is None:
                connection.connect_kwargs["sock"] = ReadAhead(_quick_socket(connection.host, connection.port))
            connection.connect_kwargs["transport_factory"] = quick_transport()
            connection.open()
        except TransportError:
            connection.close()
            raise
        except paramiko.BadHostKeyException as error:
            changed = next((hop for hop in hops if hop.host == error.hostname), connection)
            name = changed.host if changed.port == SSH_PORT else f"[{changed.host}]:{changed.port}"
            forget = _forgetting(name, self._known_hosts(changed))
            raise TransportError(
                f"the host key of {name} has CHANGED: it is {fingerprint(error.key)} now",
                kind="host_key",
                where=self.where,
                fix=f"find out why; only then `{forget}` and accept the new key",
            ) from error
        except paramiko.PasswordRequiredException as error:
            raise TransportError(
                "the private key needs a passphrase",
                kind="auth",
                where=self.where,
                fix="unlock it in ssh-agent: `ssh-add`",
            ) from error
        except paramiko.AuthenticationException as error:
            raise TransportError(
                f"{connection.user}@{address} refused the login",
                kind="auth",
                where=self.where,
                fix=f"`ssh -p {connection.port} {connection.user}@{connection.host} true` must work without a password",
            ) from error
        except (paramiko.SSHException, OSError, EOFError) as error:
            raise TransportError(
                f"cannot reach {connection.host}:{connection.port}: {error or type(error).__name__}",
                kind="unreachable",
                where=self.where,
                fix=f"see why: `ssh -p {connection.port} {connection.user}@{connection.host} true`",
            ) from error
        return connection

    def _known_hosts(self, connection: Any) -> Path:
        asked = str(connection.ssh_config.get("userknownhostsfile", KNOWN_HOSTS)).split()[0]
        return Path(os.path.expanduser(self._ssh.known_hosts or asked))  # noqa: PTH111

    def _check_keys(self, connection: Any, pinned: str | None) -> None:
        known_hosts = self._known_hosts(connection)
        client = connection.client
        if pinned is None:
            # a pinned key must be that key, whatever known_hosts says
            if not self._ssh.known_hosts:
                for system in ("/etc/ssh/ssh_known_hosts",):
                    if Path(system).exists():
                        client.load_system_host_keys(system)
            if known_hosts.exists():
                client.load_system_host_keys(str(known_hosts))
        client.set_missing_host_key_policy(
            HostKeyPolicy(HostKeyMode(self._ssh.host_key), pinned, known_hosts, self._announce)
        )
