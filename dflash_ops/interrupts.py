"""Ctrl-C (and SIGTERM, which is what ends a service or a session) while a command is only being imported.

An exception would come up anywhere in the import of a package, where some of them are lost or end in a traceback. There
is nothing to undo yet, so the process says its last words and goes.
"""

from __future__ import annotations

import os
import signal
import sys
import time

NUMBERS = (signal.SIGINT, signal.SIGTERM)
INTERRUPTED = 130
"""ExitCode.INTERRUPTED, without the imports that it takes."""
WORDS = "interrupted: type it again"


def before_the_command() -> None:
    """Until `in_the_command`. Who began us with SIGINT ignored (nohup, a job in the background) meant it."""
    for number in NUMBERS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _leave)


def in_the_command() -> None:
    """KeyboardInterrupt, for either: what has begun is left in order."""
    for number in NUMBERS:
        if number == signal.SIGTERM or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)


def _leave(*_: object) -> None:
    if "--json" in sys.argv[1:]:
        # as ui/json_view.py has them
        for number, facts in enumerate(
            (f'"event": "notice", "text": "{WORDS}"', f'"event": "result", "exit": {INTERRUPTED}'), 1
        ):
            os.write(1, f'{{"v": 1, "seq": {number}, "time": {time.time():.3f}, {facts}}}\n'.encode())
    else:
        os.write(2, f"note {WORDS}\n".encode())
    os._exit(INTERRUPTED)
