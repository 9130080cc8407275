"""Host keys are checked. fabric accepts any key and loads no known_hosts (its connection.py), so this is ours."""

from __future__ import annotations

import base64
import hashlib
import os
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import paramiko

from dflash_ops.errors import TransportError

KNOWN_HOSTS = "~/.ssh/known_hosts"
OWN = f"{KNOWN_HOSTS} ~/.ssh/known_hosts2"
SYSTEM = "/etc/ssh/ssh_known_hosts /etc/ssh/ssh_known_hosts2"
"""OpenSSH's defaults (ssh_config(5)), as `UserKnownHostsFile` and `GlobalKnownHostsFile` would say it."""


class HostKeyMode(str, Enum):
    STRICT = "strict"
    ACCEPT_NEW = "accept-new"


def fingerprint(key: paramiko.PKey) -> str:
    """`SHA256:…` as OpenSSH prints it (no padding)."""
    digest = hashlib.sha256(key.asbytes()).digest()
    return "SHA256:" + base64.b64encode(digest).decode().rstrip("=")


@dataclass(frozen=True)
class KnownHosts:
    """The files that are asked for a host's key."""

    files: tuple[Path, ...]
    own: Path
    """The first of the person's own, where a new key is kept."""

    @classmethod
    def of(cls, connection: Any, asked: str | None) -> KnownHosts:
        """`asked`: the inventory's file, which is the only one then; else ssh_config's or OpenSSH's defaults."""
        if asked is not None:
            file = _expanded(asked)
            return cls((file,), file)
        own = _files(connection.ssh_config.get("userknownhostsfile", OWN))
        system = _files(connection.ssh_config.get("globalknownhostsfile", SYSTEM))
        return cls((*own, *system), own[0] if own else Path(os.devnull))

    def load_into(self, client: Any) -> None:
        """Raises TransportError for a file that is there and cannot be read."""
        for file in self.files:
            try:
                client.load_system_host_keys(str(file))
            except FileNotFoundError:
                continue
            except (OSError, UnicodeDecodeError) as error:
                raise TransportError(
                    f"{file} cannot be read: {getattr(error, 'strerror', None) or 'it is not text'}",
                    kind="host_key",
                    where=str(file),
                    fix="it holds the keys of known hosts: make it readable, or name another as `known_hosts`",
                ) from error

    def forgetting(self, name: str) -> str:
        """The command that takes the key of `name`, as these files have it, away."""
        holding = next((file for file in self.files if _holds(file, name)), self.own)
        other = holding != _expanded(KNOWN_HOSTS)
        return f"ssh-keygen -R {shlex.quote(name)}" + (f" -f {shlex.quote(str(holding))}" if other else "")


def _holds(file: Path, name: str) -> bool:
    return file.exists() and paramiko.HostKeys(str(file)).lookup(name) is not None


def _expanded(text: str) -> Path:
    # an unknown `~user` stays as it is: there is no such file then
    return Path(os.path.expanduser(text))  # noqa: PTH111


def _files(value: str) -> tuple[Path, ...]:
    """The words of an option that lists files: parted by spaces, in quotes where one has a space in it.

    paramiko has taken a quote from both ends where both had one: what then begins with a closing quote gets them back,
    and what has none left is one file if there is such a file.
    """
    if value.lower() == "none":
        return ()
    if '"' not in value and " " in value and _expanded(value).exists():
        return (_expanded(value),)
    if '"' in value and not value[: value.index('"')].endswith((" ", "\t")):
        value = f'"{value}"'
    return tuple(map(_expanded, shlex.split(value)))


class HostKeyPolicy(paramiko.MissingHostKeyPolicy):  # type: ignore[misc]
    """Decides on a host whose key known_hosts does not hold. Runs before any authentication."""

    def __init__(
        self,
        mode: HostKeyMode,
        pinned: str | None,
        known_hosts: Path,
        announce: Callable[[str], None],
        *,
        jump: bool,
        command: str,
    ) -> None:
        """`command`: what a person types to reach this host, a `jump` on the way or the host itself."""
        self._mode = mode
        self._pinned = pinned
        self._known_hosts = known_hosts
        self._announce = announce
        self._role = "the jump host " if jump else ""
        self._command = command

    def missing_host_key(self, client: Any, hostname: str, key: paramiko.PKey) -> None:
        seen = fingerprint(key)
        if self._pinned is not None:
            if seen == self._pinned:
                return
            raise TransportError(
                f"the host key of {hostname} is {seen}, the inventory pins {self._pinned}",
                kind="host_key",
                where=hostname,
                fix="find out why the key changed; only then correct `fingerprint` in the inventory",
            )
        if self._mode is HostKeyMode.STRICT:
            # a pin speaks for the host itself
            pin = "" if self._role else f", or set `fingerprint: {seen}` for this host in the inventory"
            raise TransportError(
                f"the host key of {self._role}{hostname} is not known ({key.get_name()} {seen})",
                kind="host_key",
                where=str(self._known_hosts),
                fix=f"compare the fingerprint on the host, then connect once and accept it: `{self._command}`{pin}",
            )
        self._remember(hostname, key)
        self._announce(
            f"new host key of {self._role}{hostname} accepted: {key.get_name()} {seen} (added to {self._known_hosts})"
        )

    def _remember(self, hostname: str, key: paramiko.PKey) -> None:
        self._known_hosts.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        line = f"{hostname} {key.get_name()} {key.get_base64()}\n".encode()
        handle = os.open(self._known_hosts, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(handle, line)
        finally:
            os.close(handle)
