"""A Proxmox container: SSH to the node, then into it. Facts behind it: what a real pct prints and returns.

`pct exec` becomes lxc-attach, which hands stdin, stdout and stderr through as they are when none is a terminal, so one
of them carries the whole conversation. Its exit status is never trusted: the agent's last frame is.
"""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from dflash_ops.errors import AGAIN, STOPPED, ExitCode, OpsError, TransportError
from dflash_ops.transport.base import Pusher
from dflash_ops.transport.node import ATTACH_SCRIPT, NODE_SCRIPT, parse_node
from dflash_ops.transport.ssh import SshChannel, SshTransport

if TYPE_CHECKING:
    from dflash_ops.config import Pct, Ssh

CONTAINER_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
PUSH_TIMEOUT_S = 1800.0
LOOKS, LOOK_S = 2, 1.0
"""At a container whose program is gone."""

PUSH_SCRIPT = (
    "set -e; umask 077; "
    'find /tmp -maxdepth 1 -name "dflash-ops.????????" -user "$(id -u)" -mmin +1440 -exec rm -rf {} + 2>&- || :; '
    "d=$(mktemp -d /tmp/dflash-ops.XXXXXXXX); "
    'trap \'rm -rf "$d"\' EXIT; trap "exit 1" HUP INT TERM; '
    f'timeout {PUSH_TIMEOUT_S:.0f} cat > "$d/piece"; [ "$(wc -c < "$d/piece")" -eq "$SIZE" ] || exit 1; '
    '"$@" push "$0" "$d/piece" "$DESTINATION" </dev/null'
)
"""Node side of `push`: what did not arrive whole is not pushed. The temporary file goes away however the script ends,
also when the link swallows everything; what a script that was killed has left goes a day later.
Arguments: id, then the pct command."""


class PctTransport:
    """Runs programs in container `pct.id` of the node at `ssh.address`."""

    name = "pct"

    def __init__(self, ssh: Ssh, pct: Pct, announce: Callable[[str], None]) -> None:
        self._node = SshTransport(ssh, announce)
        self._pct = pct
        self._address = ssh.address

    @property
    def _command(self) -> list[str]:
        return [*(["sudo", "-n"] if self._pct.become == "sudo" else []), self._pct.command]

    def open(self, argv: Sequence[str]) -> SshChannel:
        # the node's environment and working directory leak into `pct exec`: env -i and an explicit PATH undo it
        clean = ["/usr/bin/env", "-i", f"PATH={CONTAINER_PATH}", "LANG=C.UTF-8", "HOME=/root"]
        execute = [*self._command, "exec", str(self._pct.id), "--", *clean, *argv]
        script = ATTACH_SCRIPT if self._pct.plain else NODE_SCRIPT
        return self._node.open(["sh", "-c", script, str(self._pct.id), *execute])

    @property
    def pusher(self) -> Pusher | None:
        return self.push if self._pct.transfer == "push" else None

    def push(self, data: bytes, destination: str) -> None:
        """Over a file on the node to `destination` in the container. Raises TransportError for what pct tells."""
        script = [
            "env",
            f"DESTINATION={destination}",
            f"SIZE={len(data)}",
            "sh",
            "-c",
            PUSH_SCRIPT,
            str(self._pct.id),
            *self._command,
        ]
        channel = self._node.open(script)
        try:
            channel.write(data)
            channel.finish_input()
            status = channel.wait(PUSH_TIMEOUT_S)
            stderr = channel.stderr()
        finally:
            channel.close()
        if status is None:
            raise TransportError("pct push did not come to its end", where=self._where, lost=True)
        if status != 0:
            known = self.explain(status, "", stderr)
            raise known or TransportError(
                f"pct push ended with status {status}: {stderr.strip() or 'no message'}", where=self._where
            )
        # exit 0 proves nothing here (errors of pct's worker are printed and forgotten): the agent verifies the bytes
        if stderr.strip():
            known = self.explain(status, "", stderr)
            if known is not None:
                raise known

    @property
    def _where(self) -> str:
        return f"container {self._pct.id} on {self._address}"

    def explain(self, status: int | None, stdout: str, stderr: str) -> OpsError | None:
        """The texts are pct's own (pve-container 6.1)."""
        number = self._pct.id
        node = parse_node(stdout)
        elsewhere = [] if node is None else [name for name in node.homes if name != node.name.partition(".")[0]]
        if elsewhere and "does not exist" in stderr:
            return TransportError(
                f"container {number} is on node {elsewhere[0]}, not on this one",
                where=self._where,
                kind="container_missing",
                fix=f"name {elsewhere[0]} as `address` of this host in the inventory",
            )
        for pattern, kind, what, fix in (
            (
                r"container '\d+' not running|can only push files to a running CT|unable to get PID for CT"
                r"|lxc-attach: .*Failed to get attach context",
                STOPPED,
                f"container {number} is not running",
                f"on {self._address}: `pct start {number}`",
            ),
            (
                r"Configuration file 'nodes/[^']*' does not exist",
                "container_missing",
                f"there is no container {number} on this node",
                f"on {self._address}: `pct list`; in a cluster the container may live on another node",
            ),
            (
                r"please run as root|Permission denied.*pve",
                "not_root",
                "pct must run as root on the node",
                "log in as root, or set `become: sudo` for this host (sudo without a password for pct)",
            ),
            (
                r"sudo: .*(password|not allowed|terminal)",
                "sudo",
                "sudo on the node asks for a password",
                f"allow `{shlex.join(self._command)}` without a password in sudoers",
            ),
            (
                r"can't lock file .* got timeout",
                "container_locked",
                f"container {number} is locked by another pct command",
                "wait until the backup, snapshot or push ends, and run the same command again",
            ),
            (
                r"(pct: (command )?not found|pct: No such file)",
                "no_pct",
                "there is no pct on this node",
                "is it a Proxmox VE node? `command` in the inventory names pct's path",
            ),
        ):
            if re.search(pattern, stderr):
                return TransportError(what, where=self._where, kind=kind, fix=fix)
        failed = re.search(r"failed to (create|open|get|change|enter)[^\n]*", stderr)
        if failed:
            return OpsError(f"pct says: {failed.group(0)}", exit_code=ExitCode.BLOCKED, kind="pct", where=self._where)
        return None

    def broke(self) -> TransportError | None:
        """Asks the node, as long as the connection to it holds. A container that is being stopped takes a moment."""
        number = self._pct.id
        for look in range(LOOKS):
            if look:
                time.sleep(LOOK_S)
            if self._status() == "status: stopped":
                return TransportError(
                    f"container {number} was stopped",
                    where=self._where,
                    kind=STOPPED,
                    fix=f"on {self._address}: `pct start {number}`, then {AGAIN}; a run in it is LOST: resume it",
                    lost=True,
                )
        return None

    def _status(self) -> str:
        """What `pct status` prints; empty where the node cannot be asked."""
        if not self._node.holds:
            return ""
        try:
            channel = self._node.open([*self._command, "status", str(self._pct.id)])
            try:
                printed = b""
                while data := channel.read(4096):
                    printed += data
            finally:
                channel.close()
        except TransportError:
            return ""
        return printed.decode(errors="replace").strip()

    def close(self) -> None:
        self._node.close()
