"""SIGUSR1: print the stack of every thread and go on."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading

STACKS = "stacks"
"""Name of the thread that serves the signal, for as long as the process lives."""


def print_stacks_on_signal() -> None:
    """Serve SIGUSR1 from a thread of its own, so that it works while the main thread is stuck in C.

    `faulthandler.register(all_threads=True)` would walk the frames of running threads without the GIL, which now and
    then is a segmentation fault. Call it in the main thread.
    """
    source, sink = os.pipe()
    os.set_blocking(sink, False)

    def serve() -> None:
        while True:
            if signal.SIGUSR1 in os.read(source, 64):
                faulthandler.dump_traceback(file=sys.stderr, all_threads=True)

    threading.Thread(target=serve, name=STACKS, daemon=True).start()
    signal.signal(signal.SIGUSR1, lambda _number, _frame: None)
    signal.set_wakeup_fd(sink, warn_on_full_buffer=False)
