"""Lay out one unprivileged LXC container whose root file system is an overlay over this machine's own `/`.

Nothing is copied: the interpreter and the virtual environment that run the tests are inside at the same paths.
"""

from __future__ import annotations

import os
import shlex
import sys
import uuid
from pathlib import Path

ID_BASE, ID_COUNT = 100_000, 65_536
NODE = Path(__file__).with_name("node")
OPAQUE = "trusted.overlay.opaque"

# What the container must not inherit from the machine.
HIDDEN = ("etc/systemd/system", "run", "tmp", "var/lib/dflash-rig", "var/lib/lxc", "var/log/journal")
# Units that want hardware, mounts or time that an unprivileged container has not; tmpfiles-setup would walk
# through the whole overlay.
MASKED = [
    "dev-hugepages.mount",
    "dev-mqueue.mount",
    "modprobe@.service",
    "sys-fs-fuse-connections.mount",
    "sys-kernel-config.mount",
    "sys-kernel-debug.mount",
    "sys-kernel-tracing.mount",
    "systemd-journal-flush.service",
    "systemd-logind.service",
    "systemd-modules-load.service",
    "systemd-networkd.service",
    "systemd-pstore.service",
    "systemd-remount-fs.service",
    "systemd-resolved.service",
    "systemd-sysusers.service",
    "systemd-timesyncd.service",
    "systemd-tmpfiles-clean.timer",
    "systemd-tmpfiles-setup-dev.service",
    "systemd-tmpfiles-setup.service",
    "systemd-udev-trigger.service",
    "systemd-udevd-control.socket",
    "systemd-udevd-kernel.socket",
    "systemd-udevd.service",
    "systemd-update-utmp.service",
]


def lay_out(folder: Path, hostname: str) -> None:
    """Write the container's layers and LXC configuration below `folder` (LXC's path / the container's name)."""
    for name in ("upper", "work", "lower", "rootfs"):
        (folder / name).mkdir(parents=True)
    _fill(folder / "upper", hostname)
    (folder / "config").write_text(_config(folder, hostname))


def _fill(upper: Path, hostname: str) -> None:
    for name in HIDDEN:
        (upper / name).mkdir(parents=True)
        os.setxattr(upper / name, OPAQUE, b"y")
    (upper / "tmp").chmod(0o1777)
    # A user of the container other than root must reach an interpreter that lies below root's home.
    if any(path.is_relative_to("/root") for path in _python_folders()):
        (upper / "root").mkdir(mode=0o711)
    (upper / "etc/fstab").write_text("")
    (upper / "etc/hostname").write_text(f"{hostname}\n")
    (upper / "etc/machine-id").write_text(f"{uuid.uuid4().hex}\n")
    units = upper / "etc/systemd/system"
    (units / "default.target").symlink_to("/lib/systemd/system/basic.target")
    for unit in MASKED:
        (units / unit).symlink_to("/dev/null")
    for root, folders, names in os.walk(upper):
        for name in (".", *folders, *names):
            os.chown(Path(root, name), ID_BASE, ID_BASE, follow_symlinks=False)


def _python_folders() -> set[Path]:
    return {Path(sys.prefix), Path(sys.base_prefix), Path(sys.executable).resolve().parent.parent}


def _absent_inside(path: Path) -> bool:
    """Hidden by the upper layer, or on another mount than `/`, which is all that the lower layer shows."""
    hidden = any(path.resolve().is_relative_to(Path("/", name)) for name in HIDDEN)
    return hidden or path.stat().st_dev != Path("/").stat().st_dev


def _config(folder: Path, hostname: str) -> str:
    layers = [folder / name for name in ("upper", "work", "lower", "rootfs")]
    hook = [sys.executable, "-IS", NODE / "mount_rootfs.py", *layers, ID_BASE, ID_COUNT]
    lines = [
        "lxc.include = /usr/share/lxc/config/common.conf",
        "lxc.include = /usr/share/lxc/config/userns.conf",
        f"lxc.uts.name = {hostname}",
        f"lxc.idmap = u 0 {ID_BASE} {ID_COUNT}",
        f"lxc.idmap = g 0 {ID_BASE} {ID_COUNT}",
        f"lxc.rootfs.path = dir:{folder / 'rootfs'}",
        "lxc.monitor.unshare = 1",
        f"lxc.hook.pre-start = {shlex.join(map(str, hook))}",
        "lxc.net.0.type = empty",
        "lxc.net.0.flags = up",
        "lxc.apparmor.profile = unconfined",
        "lxc.tty.max = 2",
        "lxc.environment = TERM=linux",
        "lxc.init.cmd = /lib/systemd/systemd",
        f"lxc.console.logfile = {folder / 'console.log'}",
    ]
    for path in sorted(filter(_absent_inside, _python_folders())):
        source = str(path).replace(" ", "\\040")
        lines.append(f"lxc.mount.entry = {source} {source.lstrip('/')} none bind,ro,create=dir,idmap=container 0 0")
    return "\n".join(lines) + "\n"
