"""`pct push` and `pct pull`: one regular file, copied by a forked worker whose failure never reaches the exit status.

As in pve-container's PVE::CLI::pct: the source of a push is opened on the node and its destination inside the
container's namespaces, the result of the copy is discarded, an existing file is truncated in place and keeps its
owner and mode.
"""

from __future__ import annotations

import ctypes
import grp
import os
import pwd
import re
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import NamedTuple, NoReturn

from pctlib.errors import PctError

CLONE_NEWNS, CLONE_NEWUSER = 0x00020000, 0x10000000
NAMESPACES = {"mnt": "mount", "user": "user"}
ENDING = (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM)
_libc = ctypes.CDLL(None, use_errno=True)


class Ownership(NamedTuple):
    """What the caller asked for; None where nothing was."""

    user: str | None
    group: str | None
    perms: str | None


class WorkerError(Exception):
    """Printed by the worker; the command still exits with 0."""


def push(init_pid: int, unprivileged: bool, source: str, destination: str, ownership: Ownership) -> None:
    def copy() -> None:
        try:
            source_fd = os.open(source, os.O_RDONLY)
        except OSError:
            raise WorkerError(f"failed to open {source} for reading") from None
        mount_namespace = _open_namespace(init_pid, "mnt")
        user_namespace = _open_namespace(init_pid, "user")
        _enter(mount_namespace, CLONE_NEWNS)
        if unprivileged:
            _enter(user_namespace, CLONE_NEWUSER)
            os.setgroups([])
            os.setgid(0)
            os.setuid(0)
        _copy(source_fd, _create(destination, ownership))

    _in_worker(copy)


def pull(init_pid: int, source: str, destination: str, ownership: Ownership) -> None:
    def copy() -> None:
        # The node's file is made, and emptied, before anyone knows whether there is a source.
        destination_fd = _create(destination, ownership)
        _enter(_open_namespace(init_pid, "mnt"), CLONE_NEWNS)
        try:
            source_fd = os.open(source, os.O_RDONLY)
        except OSError as error:
            raise WorkerError(f"failed to open {source}: {error.strerror}") from None
        _copy(source_fd, destination_fd)

    _in_worker(copy)


def _in_worker(work: Callable[[], None]) -> None:
    """Run `work` in a child of its own session and drop its status; PctError when this process is told to end."""
    # Blocked until the handlers are there: a signal must not find a worker without anyone to end it.
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    worker = os.fork()
    if worker == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
        _run_and_exit(work)

    def interrupted(signum: int, frame: FrameType | None) -> None:
        os.kill(worker, signal.SIGKILL)
        raise PctError("received interrupt")

    for number in ENDING:
        signal.signal(number, interrupted)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
    os.waitpid(worker, 0)


def _run_and_exit(work: Callable[[], None]) -> NoReturn:
    status = 1
    try:
        os.setsid()
        work()
        status = 0
    except WorkerError as error:
        print(error, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    sys.stderr.flush()
    os._exit(status)


def _open_namespace(init_pid: int, name: str) -> int:
    try:
        return os.open(f"/proc/{init_pid}/ns/{name}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        raise WorkerError(f"failed to open the container's {NAMESPACES[name]} namespace") from None


def _enter(namespace: int, flag: int) -> None:
    if _libc.setns(namespace, flag) != 0:
        raise WorkerError(f"failed to enter a container namespace: {os.strerror(ctypes.get_errno())}")


def _id(name: str | None, kind: str, look_up: Callable[[str], int]) -> int:
    """The numeric id, -1 when none was asked for."""
    if name is None:
        return -1
    if name.isdecimal():
        return int(name)
    try:
        return look_up(name)
    except KeyError:
        raise WorkerError(f"failed to get {kind} for: {name}") from None


def _mode(perms: str) -> int:
    """C's strtoul with base 0, as POSIX::strtoul is called there: `0755`, `0x1ff`."""
    text = perms if perms.startswith("0") else f"0{perms}"
    for pattern, base in ((r"0[xX][0-9a-fA-F]+", 16), (r"0[0-7]*", 8)):
        if re.fullmatch(pattern, text):
            return int(text, base)
    raise WorkerError(f"invalid mode: '{text}'")


def _create(path: str, ownership: Ownership) -> int:
    """Open `path` for writing, made or emptied; a new file gets its mode and owner only after it exists."""
    uid = _id(ownership.user, "uid", lambda name: pwd.getpwnam(name).pw_uid)
    gid = _id(ownership.group, "gid", lambda name: grp.getgrnam(name).gr_gid)
    mode = None if ownership.perms is None else _mode(ownership.perms)
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0)
    except OSError:
        try:
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        except OSError as error:
            raise WorkerError(f"failed to create file: {path}: {error.strerror}") from None
    else:
        if mode is None:
            umask = os.umask(0)
            mode = 0o666 & ~umask
    if mode is not None:
        os.fchmod(file, mode)
    if uid != -1 or gid != -1:
        try:
            os.fchown(file, uid, gid)
        except OSError as error:
            raise WorkerError(f"failed to change file owner: {error.strerror}") from None
    return file


def _copy(source: int, destination: int) -> None:
    try:
        while block := os.read(source, 1 << 20):
            left = memoryview(block)
            while left:
                left = left[os.write(destination, left) :]
    except OSError:
        # File::Copy::copy's result is discarded there too: a full disk leaves a short file and status 0.
        return
