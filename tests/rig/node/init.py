"""PID 1 of the rig's node: mounts, sshd, reaping; when its stdin ends, the kernel ends everything in the node.

    unshare --mount --pid --fork ... init.py STATE

The node is a mount and a PID namespace of its own. Whoever started it holds the other end of stdin: when that process
ends in any way, this one exits, and with PID 1 go sshd, LXC, the containers and every mount.
"""

import os
import selectors
import signal
import subprocess
import sys
from pathlib import Path


def mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True)


def private_mounts(state: Path) -> None:
    # A /run of its own: sshd needs /run/sshd at every connection, LXC and pct keep their locks there.
    mount("-t", "tmpfs", "-o", "mode=755,size=16m", "tmpfs", "/run")
    for name in ("sshd", "lock", "lock/lxc", "lxc"):
        Path("/run", name).mkdir(mode=0o755)
    # /etc/pve, Proxmox's cluster file system, without a folder of ours on the machine.
    mount("-t", "overlay", "overlay", "-o", f"lowerdir={state / 'etc'}:/etc", "/etc")
    mount("--bind", str(state / "pve"), "/etc/pve/lxc")
    # newuidmap wants root's range named, even when root asks.
    for name in ("subuid", "subgid"):
        mount("--bind", str(state / "subids"), f"/etc/{name}")
    # bash reads .bashrc for every ssh command; the machine owner's may print, be slow or fail.
    for name in (".bashrc", ".profile", ".bash_profile"):
        if Path("/root", name).exists():
            mount("--bind", "/dev/null", f"/root/{name}")
    # /usr/sbin/pct, where Proxmox has it, without a file of ours on the machine.
    mount("-t", "overlay", "overlay", "-o", f"lowerdir={state / 'sbin'}:/usr/sbin", "/usr/sbin")


def reap(sshd: int) -> bool:
    """Collect every dead child; True when sshd is one of them."""
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return True
        if pid == sshd:
            return True
        if pid == 0:
            return False


def main(state: Path) -> int:
    private_mounts(state)
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    os.set_blocking(wake_read, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    with (state / "sshd.log").open("ab") as log:
        sshd = subprocess.Popen(
            ["/usr/sbin/sshd", "-D", "-e", "-f", str(state / "sshd_config")],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    selector = selectors.DefaultSelector()
    selector.register(0, selectors.EVENT_READ)
    selector.register(wake_read, selectors.EVENT_READ)
    while True:
        ready = [key.fd for key, _ in selector.select()]
        if wake_read in ready:
            os.read(wake_read, 4096)
            if reap(sshd.pid):
                return 1
        if 0 in ready and not os.read(0, 1):
            return 0


if __name__ == "__main__":
    # os._exit: nothing to flush, and Popen's own clean-up would wait for sshd.
    os._exit(main(Path(sys.argv[1])))
