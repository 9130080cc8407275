"""The way to an SSH server: ssh_config's alias and jumps through fabric, each hop with our socket, cipher and checks.

Hops are opened one by one from here, in the order of `ProxyJump`, so that an error names the one that failed.
"""

from __future__ import annotations

import os
import shlex
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dflash_ops.errors import TransportError
from dflash_ops.transport.hostkeys import HostKeyMode, HostKeyPolicy, KnownHosts, fingerprint
from dflash_ops.transport.intake import ReadAhead

if TYPE_CHECKING:
    from dflash_ops.config import Ssh

CONNECT_TIMEOUT_S = 15
SSH_PORT = 22


@dataclass(frozen=True)
class Hop:
    connection: Any
    """fabric's, with `gateway` the hop before it or a ProxyCommand."""
    command: str
    """What a person types to try this hop alone, as the inventory or ProxyJump names it."""
    jump: bool
    """Whether it is only on the way."""

    @property
    def name(self) -> str:
        connection = self.connection
        address = f"{connection.host}:{connection.port}"
        known_as = connection.original_host
        named = address if known_as == connection.host else f"{known_as} ({address})"
        return f"the jump host {named}" if self.jump else named

    @property
    def key_name(self) -> str:
        """As known_hosts has it."""
        host, port = self.connection.host, self.connection.port
        return str(host) if port == SSH_PORT else f"[{host}]:{port}"


def quick_socket(host: str, port: int) -> socket.socket:
    """Small packets go at once, from the first: 48 ms a round trip with Nagle, 5 ms without."""
    made = socket.create_connection((host, port), CONNECT_TIMEOUT_S)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return made


def quick_transport() -> Any:
    """AES-GCM first, where both sides have it: paramiko's own first choice takes half as much time again a byte."""
    import paramiko

    ciphers = sorted(paramiko.Transport._preferred_ciphers, key=lambda name: "gcm" not in name)
    return type("QuickTransport", (paramiko.Transport,), {"_preferred_ciphers": tuple(ciphers)})


def connect(ssh: Ssh, announce: Callable[[str], None]) -> Any:
    """An open `fabric.Connection`, its `gateway`s open too. Raises TransportError; nothing stays open then."""
    hops = _hops(ssh)
    try:
        for hop in hops:
            _open(hop, ssh, announce)
    except BaseException:
        close(hops[-1].connection)
        raise
    return hops[-1].connection


def close(connection: Any) -> None:
    """The connection, then the jumps that carry it."""
    while connection is not None and not isinstance(connection, str):
        # fabric's own close leaves a client that was refused half open
        connection.client.close()
        connection = connection.gateway


def _hops(ssh: Ssh) -> list[Hop]:
    """From the first jump to the host itself."""
    import paramiko
    from fabric import Connection

    connect_kwargs: dict[str, object] = {}
    if ssh.identity_file:
        # an unknown `~user` stays as it is: there is no such file then
        connect_kwargs["key_filename"] = os.path.expanduser(ssh.identity_file)  # noqa: PTH111
    try:
        # False: no chain of fabric's, which is the other way round than OpenSSH's
        connection = Connection(ssh.address, user=ssh.user, port=ssh.port, gateway=False, connect_kwargs=connect_kwargs)
        jumps = _jumps(connection, frozenset({ssh.address}))
    except (paramiko.SSHException, ValueError, OSError) as error:
        raise TransportError(
            f"~/.ssh/config cannot be used: {error}",
            kind="ssh_config",
            where=f"ssh {ssh.address}",
            fix=f"see what ssh makes of it: `ssh -G {ssh.address}`",
        ) from error
    return [*jumps, Hop(connection, _command(ssh.address, ssh.user, ssh.port, ssh.identity_file), jump=False)]


def _jumps(connection: Any, met: frozenset[str]) -> list[Hop]:
    """Gives `connection` its gateway, and returns the hops before it.

    As OpenSSH has it: the first of `ProxyJump a,b` is reached first (through its own ProxyJump, if it has one), then
    the second through it. `met`: the names of the hosts that wait for this one. ValueError for what is no way.
    """
    from fabric import Connection
    from fabric.connection import derive_shorthand

    config = connection.ssh_config
    words = [word.strip() for word in (config.get("proxyjump") or "none").split(",")]
    # a pattern like `Host *` names the jump as its own jump: it is reached directly
    if words in (["none"], [connection.original_host], [connection.host]):
        connection.gateway = config.get("proxycommand")
        return []
    hops: list[Hop] = []
    for word in words:
        named = derive_shorthand(word)
        host = named["host"]
        if host is None or host in met:
            raise ValueError(f"ProxyJump {','.join(words)} leads back to {host}" if host else "ProxyJump names no host")
        jump = Connection(word, gateway=False)
        if hops:
            jump.gateway = hops[-1].connection
        else:
            hops = _jumps(jump, met | {host})
        hops.append(Hop(jump, _command(host, named["user"], named["port"], None), jump=True))
    connection.gateway = hops[-1].connection
    return hops


def _command(host: str, user: str | None, port: int | None, identity_file: str | None) -> str:
    options = [*(["-p", str(port)] if port else []), *(["-i", identity_file] if identity_file else [])]
    return shlex.join(["ssh", *options, f"{user}@{host}" if user else host, "true"])


def _open(hop: Hop, ssh: Ssh, announce: Callable[[str], None]) -> None:
    import paramiko

    connection = hop.connection
    connection.connect_timeout = CONNECT_TIMEOUT_S
    where = f"ssh {ssh.address}"
    known = KnownHosts.of(connection, ssh.known_hosts)
    pinned = None if hop.jump else ssh.fingerprint
    if pinned is None:
        # a pinned key must be that key, whatever known_hosts says
        known.load_into(connection.client)
    policy = HostKeyPolicy(HostKeyMode(ssh.host_key), pinned, known.own, announce, jump=hop.jump, command=hop.command)
    connection.client.set_missing_host_key_policy(policy)
    try:
        connection.connect_kwargs = {**connection.connect_kwargs, "transport_factory": quick_transport()}
        if connection.gateway is None:
            connection.connect_kwargs["sock"] = ReadAhead(quick_socket(connection.host, connection.port))
        connection.open()
    except paramiko.BadHostKeyException as error:
        raise TransportError(
            f"the host key of {'the jump host ' if hop.jump else ''}{hop.key_name} has CHANGED: "
            f"it is {fingerprint(error.key)} now",
            kind="host_key",
            where=where,
            fix=f"find out why; only then `{known.forgetting(hop.key_name)}` and accept the new key",
        ) from error
    except paramiko.PasswordRequiredException as error:
        raise TransportError(
            f"the private key for {hop.name} needs a passphrase",
            kind="auth",
            where=where,
            fix="unlock it in ssh-agent: `ssh-add`",
        ) from error
    except paramiko.AuthenticationException as error:
        raise _no_login(f"{hop.name} refused the login of {connection.user}", hop, where) from error
    except (paramiko.SSHException, OSError, EOFError) as error:
        why = getattr(error, "text", "") or str(error) or type(error).__name__
        if why == "No authentication methods available":
            raise _no_login(
                f"there is no key for {hop.name}: neither ssh-agent nor a file has one", hop, where
            ) from error
        through = getattr(connection.gateway, "original_host", "")
        raise TransportError(
            f"cannot reach {hop.name}{f' through {through}' if through else ''}: {why}",
            kind="unreachable",
            where=where,
            fix=f"see why: `{hop.command}`",
        ) from error


def _no_login(what: str, hop: Hop, where: str) -> TransportError:
    return TransportError(what, kind="auth", where=where, fix=f"`{hop.command}` must work without a password")
