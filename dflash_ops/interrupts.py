"""Ctrl-C, SIGTERM (which ends a service or a session) and SIGHUP (a closed terminal) end a command in order.

While it is only being imported, an exception would come up anywhere in the import of a package, where some of them are
lost or end in a traceback. There is nothing to undo yet, so the process says its last words and goes.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
import time

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
INTERRUPTED = 130
"""ExitCode.INTERRUPTED, without the imports that it takes."""
WORDS = "interrupted: type it again"


def before_the_command() -> None:
    """Until `in_the_command`. Who began us with one of them ignored (nohup, a job in the background) meant it."""
    for number in NUMBERS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _leave)


def in_the_command() -> None:
    """KeyboardInterrupt, for each of them: what has begun is left in order."""
    for number in NUMBERS:
        if number == signal.SIGTERM or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _hang_up if number == signal.SIGHUP else signal.default_int_handler)


def is_hung_up() -> bool:
    """Whether the terminal that this process writes to is gone."""
    import termios

    for output in (1, 2):
        try:
            termios.tcgetattr(output)
        except termios.error as error:
            if error.args[0] == errno.EIO:
                return True
    return False


def _hang_up(*_: object) -> None:
    # the kernel and the shell each say it: the second must not disturb what is being left in order
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    raise KeyboardInterrupt


def _leave(*_: object) -> None:
    # whoever listened may be gone
    with contextlib.suppress(OSError):
        _last_words()
    os._exit(INTERRUPTED)


def _last_words() -> None:
    if "--json" in sys.argv[1:]:
        # as ui/json_view.py has them
        for number, facts in enumerate(
            (f'"event": "notice", "text": "{WORDS}"', f'"event": "result", "exit": {INTERRUPTED}'), 1
        ):
            os.write(1, f'{{"v": 1, "seq": {number}, "time": {time.time():.3f}, {facts}}}\n'.encode())
    else:
        os.write(2, f"note {WORDS}\n".encode())
