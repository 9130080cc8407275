"""Python's cyclic garbage collector, kept away from compiled code.

Collecting what compiled worker threads leave behind ended a process with SIGSEGV (torch 2.11, Python 3.12, H200; the
crashing stack said "Garbage-collecting", after the threads had ended). A collection may also start in any thread at any
allocation, a capture included. So: none while models are built, compiled and captured; and what was compiled is never
torn down by the collector. `trainer.compile.steady_phase` does both.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def paused_collector() -> Iterator[None]:
    """No automatic collection inside the block. Reference counting goes on as always."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def keep_from_collector() -> None:
    """Everything that lives now is never looked at again by the collector."""
    gc.freeze()
