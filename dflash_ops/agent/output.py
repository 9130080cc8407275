"""A job's output on its way into the log. With secrets to hide it goes through here, and never lies there unmasked."""

from __future__ import annotations

import contextlib
import os
import select
import threading
from pathlib import Path
from typing import Iterator, Optional

from .masking import MaskedStream, Masks

_LOOK_S = 0.05
_READ_SIZE = 256 * 1024
_AFTER_THE_END = 1024 * 1024
"""Bytes that are still read once the job is dead: more than a pipe holds, so that a stranger cannot go on for ever."""


class JobOutput:
    """Gives a job what to write to; `finish` returns when all that was written lies in the log."""

    def __init__(self, path: Path, masks: Masks) -> None:
        self._path = path
        self._masks = masks
        self._stop = threading.Event()
        self._thread: Optional[threading.Thread] = None

    @contextlib.contextmanager
    def writer(self) -> Iterator[int]:
        """The file descriptor for the job's output: the log itself, or with secrets a pipe to a thread here."""
        log = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        if not self._masks:
            try:
                yield log
            finally:
                os.close(log)
            return
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        self._thread = threading.Thread(target=self._carry, args=(reading, log), name="job-output", daemon=True)
        self._thread.start()
        try:
            yield writing
        finally:
            os.close(writing)

    def finish(self) -> None:
        """To be called when the job is dead. A stranger that still holds the pipe is not waited for."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _carry(self, reading: int, log: int) -> None:
        stream, left = MaskedStream(self._masks), _AFTER_THE_END
        try:
            while left > 0:
                # asked before the read: what was written before the end is then read too
                ended = self._stop.is_set()
                select.select([reading], [], [], 0 if ended else _LOOK_S)
                try:
                    data = os.read(reading, _READ_SIZE)
                except BlockingIOError:
                    if ended:
                        break
                    continue
                if not data:
                    break
                left -= len(data) if ended else 0
                _write(log, stream.feed(data))
            _write(log, stream.rest())
        finally:
            os.close(reading)
            os.close(log)


def _write(log: int, data: bytes) -> None:
    """A full disk loses output, and never holds up the job."""
    rest = memoryview(data)
    with contextlib.suppress(OSError):
        while rest:
            rest = rest[os.write(log, rest) :]
