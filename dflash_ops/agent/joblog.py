"""The way of a job's output into its log: a pipe, and a small process that empties it.

The job writes into a pipe, not into a file, so that the log can be cut and capped and a full disk never reaches the
job. The pump is a process of its own: when the supervisor is killed, it goes on until the job has ended, and when the
pump is killed, the supervisor, which holds the pipe open, starts another. Only when both are gone does the job get
EPIPE. The pump does not carry the run's mark: what kills the run's processes leaves it, and it ends with their output.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import time
from typing import Optional

from .children import fork
from .logfiles import LogFolder, LogWriter
from .masking import MaskedStream, Masks
from .policy import Policy

_PIPE_BYTES = 1024 * 1024
_READ_BYTES = 64 * 1024
_F_SETPIPE_SZ = 1031
_RETRY_S = 0.2


def pump(source: int, control: int, writer: LogWriter, masks: Masks) -> None:
    """Copies from `source` until its end, secrets masked.

    `control` is the supervisor's: a byte on it says "take what is there, and end" (something keeps the pipe open that
    would not die), its end that the supervisor is gone, and that nobody but the job says when this ends.
    """
    listening, told, stream = [control], False, MaskedStream(masks)
    while True:
        # what the log owes its reader on a full disk is tried again, also when the job is silent
        patience = _RETRY_S if not writer.settle() else None
        ready = select.select([source, *listening], [], [], 0 if told else patience)[0]
        if control in ready:
            told = bool(os.read(control, 1))
            listening = []
        if source in ready:
            data = os.read(source, _READ_BYTES)
            if data:
                writer.write(stream.feed(data) if masks else data)
                continue
            break
        if told:
            break
    writer.write(stream.rest())
    while listening and not writer.settle():
        if select.select(listening, [], [], _RETRY_S)[0]:
            return


class JobLog:
    """The supervisor's side: the pipe, and the pump, started anew as often as it is killed."""

    def __init__(self, folder: LogFolder, policy: Policy) -> None:
        self._folder = folder
        self._policy = policy
        self._masks = Masks()
        self._source, self.sink = os.pipe()
        with contextlib.suppress(OSError):
            # more than the default, so that the job hardly ever waits for the pump
            fcntl.fcntl(self.sink, _F_SETPIPE_SZ, _PIPE_BYTES)
        self._control: Optional[int] = None
        self.pump: Optional[int] = None
        """Its pid; None once all is written."""

    def start(self, masks: Masks, note: Optional[str] = None) -> None:
        self._masks = masks
        reading, writing = os.pipe()

        def work() -> None:
            writer = LogWriter(self._folder, self._policy.log_rotate_bytes, self._policy.log_max_bytes)
            if note is not None:
                writer.note(note)
            pump(self._source, reading, writer, masks)

        self.pump = fork(work, keep=(self._source, reading), deaf=True)
        os.close(reading)
        if self._control is not None:
            os.close(self._control)
        self._control = writing

    def job_started(self) -> None:
        """From now on only the job, and what it starts, can write."""
        os.close(self.sink)

    def reaped(self, pid: int, status: int) -> None:
        """A child of the supervisor has ended."""
        if pid != self.pump:
            return
        self.pump = None
        if status != 0:
            # whatever killed it may do so again at once
            time.sleep(_RETRY_S)
            self.start(self._masks, f"the writer of this log was killed; up to {_READ_BYTES} bytes may be missing here")

    def finish(self) -> None:
        """No more than what is in the pipe now."""
        if self._control is not None:
            with contextlib.suppress(OSError):
                os.write(self._control, b"!")

    def give_up(self) -> None:
        """The disk does not answer; nothing may be written after the end."""
        if self.pump is not None:
            os.kill(self.pump, signal.SIGKILL)
            self.pump = None
