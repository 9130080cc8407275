"""SIGUSR1: print the stack of every thread and go on."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
from typing import Any


def print_on_signal() -> None:
    """Serve SIGUSR1 from a thread of its own, so that it works while the main thread is stuck in C.

    `faulthandler.register(all_threads=True)` would walk the frames of running threads without the GIL, and
    crashes them now and then.
    """
    source, sink = os.pipe()
    os.set_blocking(sink, False)

    def ignore(number: int, frame: Any) -> None:
        return

    def serve() -> None:
        while True:
            if signal.SIGUSR1 in os.read(source, 64):
                faulthandler.dump_traceback(file=sys.stderr, all_threads=True)

    threading.Thread(target=serve, name="stacks", daemon=True).start()
    signal.signal(signal.SIGUSR1, ignore)
    signal.set_wakeup_fd(sink, warn_on_full_buffer=False)
