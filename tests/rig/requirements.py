"""Whether this machine can hold the rig, and the reason where it cannot."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.rig.container import ID_BASE, ID_COUNT

NODE = Path(__file__).with_name("node")
STATES = Path("/var/lib/dflash-rig")
# Where the program is looked for, and the Debian package that brings it.
PROGRAMS = {
    "/usr/sbin/sshd": "openssh-server",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "lxc-start": "lxc",
    "lxc-attach": "lxc",
    "newuidmap": "uidmap",
    "sudo": "sudo",
    "/lib/systemd/systemd": "systemd",
    "dbus-daemon": "dbus",
    "nsenter": "util-linux",
    "unshare": "util-linux",
}


def missing() -> str | None:
    """Why the rig cannot run here, in one sentence; None when it can."""
    if sys.platform != "linux":
        return "the rig needs Linux"
    if os.geteuid() != 0:
        return "the rig needs root"
    packages = {package for program, package in PROGRAMS.items() if shutil.which(program) is None}
    if packages:
        return f"the rig needs packages: apt-get install --no-install-recommends {' '.join(sorted(packages))}"
    for name in ("/etc/subuid", "/etc/subgid"):
        if not Path(name).exists():
            return f"the rig needs a file at {name} (an empty one will do)"
    return _kernel_refuses()


def _kernel_refuses() -> str | None:
    """Mount a root file system once, as a container does, in a mount namespace that is thrown away."""
    STATES.mkdir(mode=0o755, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="probe-", dir=STATES) as folder:
        layers = [Path(folder, name) for name in ("upper", "work", "lower", "rootfs")]
        for layer in layers:
            layer.mkdir()
        mount = [sys.executable, "-IS", str(NODE / "mount_rootfs.py"), *map(str, layers), str(ID_BASE), str(ID_COUNT)]
        tried = subprocess.run(
            ["unshare", "--mount", "--propagation", "private", *mount],
            capture_output=True,
            text=True,
            check=False,
        )
        if tried.returncode:
            last = (tried.stderr.strip().splitlines() or [f"status {tried.returncode}"])[-1]
            return f"this kernel cannot mount an id-mapped overlay over /: {last}"
    return None
