"""Mount a container's root file system: a writable overlay over the node's own `/`, seen through an id map.

    mount_rootfs.py UPPER WORK LOWER ROOTFS BASE COUNT

LXC calls it as the pre-start hook, in the monitor's own mount namespace, so that nothing is left behind. The lower
layer is an id-mapped clone of the mount at `/`: an owner of 0 on disk reads as BASE, which the container's map turns
into 0 again. util-linux before 2.39 has no `X-mount.idmap`, hence the system calls (`mount_setattr(2)`).
"""

import ctypes
import os
import signal
import subprocess
import sys

# The same numbers on x86_64 and arm64 (asm-generic/unistd.h).
SYS_OPEN_TREE, SYS_MOVE_MOUNT, SYS_MOUNT_SETATTR = 428, 429, 442
AT_FDCWD, AT_EMPTY_PATH = -100, 0x1000
OPEN_TREE_CLONE, MOVE_MOUNT_F_EMPTY_PATH, MOUNT_ATTR_IDMAP = 1, 4, 0x00100000
CLONE_NEWUSER = 0x10000000

libc = ctypes.CDLL(None, use_errno=True)


class MountAttr(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("attr_set", "attr_clr", "propagation", "userns_fd")]


def checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def idmapped_bind(source: str, destination: str, base: int, count: int) -> None:
    """Bind `source` (that mount only, nothing mounted below it) at `destination` with ids 0.. shown as `base`.."""
    ready_read, ready_write = os.pipe()
    child = os.fork()
    if child == 0:
        checked(libc.unshare(CLONE_NEWUSER), "unshare(CLONE_NEWUSER)")
        os.write(ready_write, b"x")
        signal.pause()
        os._exit(0)
    os.close(ready_write)
    try:
        if not os.read(ready_read, 1):
            raise OSError("user namespaces are not available")
        for which in ("uid_map", "gid_map"):
            with open(f"/proc/{child}/{which}", "w") as file:
                file.write(f"0 {base} {count}\n")
        user_namespace = os.open(f"/proc/{child}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
        tree = checked(libc.syscall(SYS_OPEN_TREE, AT_FDCWD, source.encode(), OPEN_TREE_CLONE), "open_tree")
        attributes = MountAttr(MOUNT_ATTR_IDMAP, 0, 0, user_namespace)
        checked(
            libc.syscall(
                SYS_MOUNT_SETATTR,
                tree,
                b"",
                AT_EMPTY_PATH,
                ctypes.byref(attributes),
                ctypes.sizeof(attributes),
            ),
            "mount_setattr(MOUNT_ATTR_IDMAP)",
        )
        checked(
            libc.syscall(SYS_MOVE_MOUNT, tree, b"", AT_FDCWD, destination.encode(), MOVE_MOUNT_F_EMPTY_PATH),
            "move_mount",
        )
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def main(arguments: list[str]) -> None:
    upper, work, lower, rootfs, base, count = arguments[:6]
    idmapped_bind("/", lower, int(base), int(count))
    options = f"lowerdir={lower},upperdir={upper},workdir={work}"
    subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, rootfs], check=True)


if __name__ == "__main__":
    main(sys.argv[1:])
