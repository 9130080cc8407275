"""The rig: a node (sshd, pct) with a real container on it, for one test process."""

from __future__ import annotations

import contextlib
import os
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.rig import container, requirements
from tests.rig.state import State

SYSTEMD_UP = {"running", "degraded"}
START_S = 240
PUSH_S = 120
"""No push of a test takes longer."""
USER_ID = 60_100
"""Of the users that only the node has, the first."""
UNSHARE = ["unshare", "--mount", "--propagation=slave", "--pid", "--mount-proc", "--fork", "--kill-child"]
# The environment that sshd gives root, for what tests run on the node without ssh.
NODE_ENVIRONMENT = {
    "HOME": "/root",
    "LOGNAME": "root",
    "USER": "root",
    "SHELL": "/bin/bash",
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
}
CONFIGURATION = """\
arch: amd64
cores: 2
hostname: ct{vmid}
memory: 2048
ostype: debian
rootfs: local:{vmid}/vm-{vmid}-disk-0.raw,size=8G
swap: 512
unprivileged: 1
"""


class RigError(RuntimeError):
    """The rig could not be brought up, or something on it failed that never should."""


class Rig:
    """A node behind sshd on 127.0.0.1, with container 200 running and container 201 stopped.

    `ssh -F ssh_config node` reaches the node, where `pct` is; `box` is another name for the same sshd, for tests that
    take it as a plain host.
    """

    container_id = 200
    stopped_container_id = 201
    missing_container_id = 999
    elsewhere_container_id = 300
    elsewhere_node = "pve2"
    operator, limited = "rig-operator", "rig-limited"
    """Users of the node who are not root: sudo gives the one pct without a password, the other no more than true."""
    node = "node"
    box = "box"

    def __init__(self) -> None:
        self._state = State(requirements.STATES)
        self.folder = self._state.folder
        self.ssh_config = self.folder / "ssh_config"
        self.known_hosts = self.folder / "known_hosts"
        self.identity = self.folder / "identity"
        self.pct_conf_dir = self.folder / "pve"
        self.sshd_log = self.folder / "sshd.log"
        self.port = 0
        self.host_key_fingerprint = ""
        self._node_process: subprocess.Popen[bytes] | None = None

    def up(self) -> None:
        """Start everything; RigError with the log's end when a part does not come up."""
        self._write_files()
        self._start_node()
        self.start_container()

    def down(self) -> None:
        """End every process, mount and cgroup of the rig and remove its folder."""
        self._stop_node()
        self._state.remove()

    # The container

    def start_container(self) -> None:
        """`pct start`, then wait until systemd inside is up."""
        started = self.node_run(["pct", "start", str(self.container_id)])
        if started.returncode:
            log = self._lxc_folder / "lxc.log"
            raise RigError(f"pct start: {started.stderr}{log.read_text() if log.exists() else ''}")
        deadline = time.monotonic() + START_S
        while (state := self._systemd_state()) not in SYSTEMD_UP:
            if time.monotonic() > deadline:
                raise RigError(f"systemd in the container is {state!r} after {START_S} s")
            time.sleep(0.02)

    def stop_container(self) -> None:
        stopped = self.node_run(["pct", "stop", str(self.container_id)])
        if stopped.returncode:
            raise RigError(f"pct stop: {stopped.stderr}")

    def exec_in_container(
        self, argv: Sequence[str], *, stdin: str = "", check: bool = False
    ) -> subprocess.CompletedProcess[str]:
        """Run `argv` as root of the container, past pct: plain lxc-attach with a clean environment."""
        attach = ["lxc-attach", "-P", str(self.folder / "lxc"), "-n", self._lxc_name, "--clear-env"]
        return self.node_run([*attach, "--set-var", "HOME=/root", "--", *argv], stdin=stdin, check=check)

    @contextlib.contextmanager
    def full_disk(self, path: str, size: int) -> Iterator[None]:
        """A tmpfs of `size` bytes at `path` in the container, for as long as the block runs."""
        self.exec_in_container(["mkdir", "-p", path], check=True)
        self.exec_in_container(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", path], check=True)
        try:
            yield
        finally:
            self.exec_in_container(["umount", "--lazy", path], check=True)

    # The node

    def node_run(
        self,
        argv: Sequence[str],
        *,
        stdin: str = "",
        cwd: Path = Path("/"),
        check: bool = False,
        timeout_s: float = 120,
    ) -> subprocess.CompletedProcess[str]:
        """Run `argv` on the node as root without ssh, in sshd's namespaces and with its environment."""
        return subprocess.run(
            [*self._enter_node(cwd), *argv],
            input=stdin,
            capture_output=True,
            text=True,
            check=check,
            env=NODE_ENVIRONMENT,
            timeout=timeout_s,
        )

    def left_of_pushes(self) -> list[str]:
        """What pushes left on the node. Rigs that run side by side share /tmp: what is there now and goes away was a
        push of another's."""
        deadline = time.monotonic() + PUSH_S
        left = self._in_tmp()
        while left and time.monotonic() < deadline:
            time.sleep(0.1)
            left &= self._in_tmp()
        return sorted(left)

    def _in_tmp(self) -> set[str]:
        return set(self.node_run(["find", "/tmp", "-maxdepth", "1", "-name", "dflash-ops.*"]).stdout.split())

    def ssh_argv(self, command: str, *, host: str = node) -> list[str]:
        """The system's ssh with the rig's configuration, running `command` on `host` (`node` or `box`)."""
        return ["ssh", "-F", str(self.ssh_config), host, command]

    def _enter_node(self, cwd: Path) -> list[str]:
        if self._node_process is None:
            raise RigError("the node is not up")
        namespaces = f"/proc/{self._node_process.pid}/ns"
        return [
            "nsenter",
            f"--mount={namespaces}/mnt",
            f"--pid={namespaces}/pid_for_children",
            f"--wd={cwd}",
            "--",
        ]

    @property
    def _lxc_name(self) -> str:
        return f"{self.folder.name}-{self.container_id}"

    @property
    def _lxc_folder(self) -> Path:
        return self.folder / "lxc" / self._lxc_name

    def _systemd_state(self) -> str:
        return self.exec_in_container(["systemctl", "is-system-running"]).stdout.strip()

    def _write_files(self) -> None:
        container.lay_out(self._lxc_folder, f"ct{self.container_id}")
        self.pct_conf_dir.mkdir()
        for vmid in (self.container_id, self.stopped_container_id):
            (self.pct_conf_dir / f"{vmid}.conf").write_text(CONFIGURATION.format(vmid=vmid))
        cluster = self.folder / "etc" / "pve"
        (cluster / "lxc").mkdir(parents=True)
        elsewhere = cluster / "nodes" / self.elsewhere_node / "lxc" / f"{self.elsewhere_container_id}.conf"
        elsewhere.parent.mkdir(parents=True)
        elsewhere.write_text(CONFIGURATION.format(vmid=self.elsewhere_container_id))
        self._write_users()
        (self.folder / "subids").write_text(f"root:{container.ID_BASE}:{container.ID_COUNT}\n")
        pct = self.folder / "sbin" / "pct"
        pct.parent.mkdir()
        words = [sys.executable, "-ES", requirements.NODE / "pct", self.folder]
        # as PVE::RESTEnvironment dies; who is not root may not even reach this interpreter
        refusal = '[ "$(id -u)" = 0 ] || { echo "please run as root" >&2; exit 255; }'
        pct.write_text(f'#!/bin/sh\n{refusal}\nexec {shlex.join(map(str, words))} "$@"\n')
        pct.chmod(0o755)
        attach = self.folder / "sbin" / "lxc-attach"
        # Proxmox calls a container by its id; several rigs have one of each
        named = f'exec /usr/bin/lxc-attach -P {shlex.quote(str(self.folder / "lxc"))} -n {self.folder.name}-"$id" "$@"'
        attach.write_text(
            f'#!/bin/sh\nif [ "$1" = -n ]; then id=$2; shift 2; {named}; fi\nexec /usr/bin/lxc-attach "$@"\n'
        )
        attach.chmod(0o755)
        for name in ("host_key", "identity"):
            make = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", f"rig-{name}", "-f"]
            subprocess.run([*make, str(self.folder / name)], check=True)
        shown = ["ssh-keygen", "-l", "-E", "sha256", "-f", str(self.folder / "host_key.pub")]
        listed = subprocess.run(shown, check=True, capture_output=True, text=True)
        self.host_key_fingerprint = listed.stdout.split()[1]

    def _write_users(self) -> None:
        """In the node's own /etc."""
        etc, users = self.folder / "etc", (self.operator, self.limited)
        there = Path("/etc/passwd").read_text()
        lines = (f"{name}:x:{USER_ID + number}:{USER_ID}::/tmp:/bin/sh" for number, name in enumerate(users))
        (etc / "passwd").write_text(there + "".join(f"{each}\n" for each in lines))
        # "*": no password fits, and yet the account is not locked
        (etc / "shadow").write_text("".join(f"{name}:*:19000:0:99999:7:::\n" for name in ("root", *users)))
        (etc / "shadow").chmod(0o600)
        sudoers = f"{self.operator} ALL=(root) NOPASSWD: /usr/sbin/pct\n{self.limited} ALL=(root) NOPASSWD: /bin/true\n"
        (etc / "sudoers").write_text(sudoers)
        (etc / "sudoers").chmod(0o440)

    def _start_node(self) -> None:
        # Another process may take the port between the choice and sshd's bind.
        for _ in range(5):
            self._configure_ssh(_free_port())
            init = [sys.executable, "-IS", str(requirements.NODE / "init.py"), str(self.folder)]
            with self.sshd_log.open("ab") as log:
                self._node_process = subprocess.Popen(
                    [*UNSHARE, *init],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=log,
                    env=NODE_ENVIRONMENT,
                    cwd="/",
                )
            if self._sshd_answers():
                return
            self._stop_node()
        raise RigError(f"sshd does not come up:\n{self.sshd_log.read_text()[-2000:]}")

    def _sshd_answers(self) -> bool:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self._node_process and self._node_process.poll() is None:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 5) as greeting:
                if greeting.recv(4) == b"SSH-" and self._node_process.poll() is None:
                    return True
            time.sleep(0.01)
        return False

    def _stop_node(self) -> None:
        process, self._node_process = self._node_process, None
        if process is None or process.stdin is None:
            return
        process.stdin.close()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _configure_ssh(self, port: int) -> None:
        self.port = port
        folder = self.folder
        (folder / "authorized_keys").write_text((folder / "identity.pub").read_text())
        set_environment = "".join(f" {name}={value}" for name, value in os.environ.items() if name == "PCT_STARTUP_MS")
        (folder / "sshd_config").write_text(
            f"""\
Port {port}
ListenAddress 127.0.0.1
HostKey {folder}/host_key
PidFile none
AuthorizedKeysFile {folder}/authorized_keys
StrictModes no
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
UseDNS no
PrintMotd no
PrintLastLog no
X11Forwarding no
AllowTcpForwarding yes
MaxStartups 100:30:200
MaxSessions 50
Subsystem sftp internal-sftp
LogLevel VERBOSE
SetEnv PATH={NODE_ENVIRONMENT["PATH"]}{set_environment}
"""
        )
        host_key = " ".join((folder / "host_key.pub").read_text().split()[:2])
        self.known_hosts.write_text(f"[127.0.0.1]:{port} {host_key}\n")
        self.ssh_config.write_text(
            f"""\
Host {self.node} {self.box}
  HostName 127.0.0.1
  Port {port}
  User root
  IdentityFile {self.identity}
  IdentitiesOnly yes
  UserKnownHostsFile {self.known_hosts}
  GlobalKnownHostsFile /dev/null
  StrictHostKeyChecking yes
  BatchMode yes
  ConnectTimeout 10
"""
        )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
