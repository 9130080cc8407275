"""The container's configuration lock, as PVE::Tools::lock_file takes it."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from pctlib.errors import PctError

TIMEOUT_S = 10


class _TimedOut(Exception):
    pass


def _on_alarm(signum: int, frame: FrameType | None) -> None:
    raise _TimedOut


@contextmanager
def config_lock(vmid: str) -> Iterator[None]:
    """Hold the lock; one that stays taken for 10 s ends in PctError with status EINTR, as Perl's `die` has it."""
    path = f"/run/lock/lxc/pve-config-{vmid}.lock"
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print("trying to acquire lock...", file=sys.stderr, flush=True)
        before = signal.signal(signal.SIGALRM, _on_alarm)
        signal.alarm(TIMEOUT_S)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except _TimedOut:
            raise PctError(f"can't lock file '{path}' - got timeout", errno.EINTR) from None
        finally:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, before)
        print(" OK", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        os.close(lock)
