"""Host keys are checked. fabric accepts any key and loads no known_hosts (its connection.py), so this is ours."""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import paramiko

from dflash_ops.errors import TransportError


class HostKeyMode(str, Enum):
    STRICT = "strict"
    ACCEPT_NEW = "accept-new"


def fingerprint(key: paramiko.PKey) -> str:
    """`SHA256:…` as OpenSSH prints it (no padding)."""
    digest = hashlib.sha256(key.asbytes()).digest()
    return "SHA256:" + base64.b64encode(digest).decode().rstrip("=")


class HostKeyPolicy(paramiko.MissingHostKeyPolicy):  # type: ignore[misc]
    """Decides on a host whose key known_hosts does not hold. Runs before any authentication."""

    def __init__(
        self,
        mode: HostKeyMode,
        pinned: str | None,
        known_hosts: Path,
        announce: Callable[[str], None],
    ) -> None:
        self._mode = mode
        self._pinned = pinned
        self._known_hosts = known_hosts
        self._announce = announce

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
            raise TransportError(
                f"the host key of {hostname} is not known ({key.get_name()} {seen})",
                kind="host_key",
                where=str(self._known_hosts),
                fix="compare the fingerprint on the host, then connect once with ssh and accept it, "
                f"or set `fingerprint: {seen}` for this host in the inventory",
            )
        self._remember(hostname, key)
        self._announce(f"new host key of {hostname} accepted: {key.get_name()} {seen} (added to {self._known_hosts})")

    def _remember(self, hostname: str, key: paramiko.PKey) -> None:
        self._known_hosts.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        line = f"{hostname} {key.get_name()} {key.get_base64()}\n".encode()
        handle = os.open(self._known_hosts, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(handle, line)
        finally:
            os.close(handle)
