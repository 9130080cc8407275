"""The supervisor's own helpers: children that are it again with one small thing to do, and its log."""

from __future__ import annotations

import contextlib
import os
import signal
from typing import Callable, Tuple

_HANDLED = (signal.SIGCHLD, signal.SIGHUP, signal.SIGINT, signal.SIGTERM)


def fork(work: Callable[[], None], *, keep: Tuple[int, ...] = (), deaf: bool = False) -> int:
    """Runs `work` in a child with its own copy of nothing but the standard streams and `keep`; its pid.

    The supervisor has no threads, so a fork is safe there. A `deaf` child ignores the polite signals: it ends when
    its work is done, whoever signals the whole group. Exit code 1, with a traceback, where `work` raised.
    """
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        for number in _HANDLED:
            signal.signal(number, signal.SIG_IGN if deaf and number != signal.SIGCHLD else signal.SIG_DFL)
        for name in os.listdir("/proc/self/fd"):
            if int(name) > 2 and int(name) not in keep:
                _close(int(name))
        work()
        code = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(code)


def _close(fd: int) -> None:
    try:
        os.close(fd)
    except OSError:
        # the one by which the folder was listed
        pass


def say(text: str) -> None:
    """To supervisor.log, which may lie on the full disk that this is about."""
    with contextlib.suppress(OSError):
        os.write(1, f"{text}\n".encode())
