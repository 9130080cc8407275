"""Keeps the end of a stream that nobody reads otherwise, so that it can neither block its writer nor fill memory."""

from __future__ import annotations

import threading
from collections.abc import Callable

KEEP_BYTES = 64 * 1024
SETTLE_S = 2.0
"""Once a program has ended so has its error output, unless something that it left behind holds it open."""


class StreamTail:
    """Drains `read` in a thread of its own until it returns b""."""

    def __init__(self, read: Callable[[int], bytes], name: str) -> None:
        self._read = read
        self._kept = bytearray()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._drain, name=name, daemon=True)
        self._thread.start()

    def _drain(self) -> None:
        while True:
            try:
                chunk = self._read(16384)
            except TimeoutError:
                # silence is no end
                continue
            except (OSError, EOFError, ValueError):
                return
            if not chunk:
                return
            with self._lock:
                self._kept += chunk
                del self._kept[:-KEEP_BYTES]

    def text(self) -> str:
        """What was kept, after waiting a moment for the stream's end."""
        self._thread.join(SETTLE_S)
        with self._lock:
            return self._kept.decode("utf-8", "replace")
