"""Stopping a run: ask, wait for its checkpoint, and prove that nothing of it is left."""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import time
from typing import Any, Dict

from . import gpu_memory
from .arguments import Arguments
from .conversation import Conversation
from .devices import search_path
from .files import exclusive, write_json
from .follow import POLL_S
from .policy import Policy
from .runs import RunFolder, RunState, find_run, last_restart

SLACK_S = 30.0
"""Over the grace: a supervisor may wait 20 s for the log to come to its end before its last word."""


def op_stop(conversation: Conversation, args: Arguments) -> Dict[str, Any]:
    """Events `phase`: asked, then killed if it took that, and verified.

    `remaining` holds what would not die, `gpu_memory` what is in use of each of its GPUs (None without GPUs).
    """
    work = conversation.work
    asked = find_run(work, args.optional_run())
    with exclusive(work.guard):
        # under the guard a restart has either happened, or it will see this request
        folder = last_restart(work, asked)
        grace_s = args.seconds("grace_s", Policy.of_record(folder.record()).grace_s)
        running, waits = folder.state() is RunState.RUNNING, folder.starts_again
        if running or waits:
            _ask(folder, grace_s)
    if running or waits:
        # a disk that takes no event any more is one reason to stop
        with contextlib.suppress(OSError):
            work.record("stop", run=folder.run, grace_s=grace_s)
        what = _asked(folder, grace_s) if running else "it will not be started again"
        conversation.event("phase", phase="asked", what=what, run=folder.run)
        _wait(folder, (grace_s if running else 0) + SLACK_S)
    if folder.goes_on:
        # it had time enough to do this itself
        supervisor = folder.supervisor()
        if supervisor is not None:
            supervisor.send(signal.SIGKILL)
    if folder.mark.pids():
        conversation.event("phase", phase="killed", what="killed what its supervisor did not")
    elif running and (folder.ended() or {}).get("forced"):
        lost = (
            "nothing after its last checkpoint is kept" if folder.prepares() is None else "what it has prepared stays"
        )
        what = f"it did not end in {grace_s:g} s and was killed: {lost}"
        conversation.event("phase", phase="killed", what=what)
    remaining = folder.mark.kill()
    if folder.state() is RunState.LOST:
        _forget_unit(folder)
    found = gpu_memory.after(work, folder.record().get("gpu_memory_bytes"))
    left = None if found is None else [one.to_json() for one in found]
    words = [f"{len(remaining)} processes of the run are left", *(one["what"] for one in left or ())]
    conversation.event("phase", phase="verified", what="; ".join(words), gpu_memory=left)
    return {**folder.summary(), "remaining": remaining, "gpu_memory": left}


def _asked(folder: RunFolder, grace_s: float) -> str:
    if folder.prepares() is None:
        return f"asked for a checkpoint, {grace_s:g} s to write it"
    return f"asked to end; what it has prepared stays, in {folder.prepares()}"


def _ask(folder: RunFolder, grace_s: float) -> None:
    try:
        write_json(folder.stop_file, {"v": 1, "time": time.time(), "grace_s": grace_s})
    except OSError:
        # the run itself may be what fills the disk: SIGTERM asks for the same, with the run's own grace
        supervisor = folder.supervisor()
        if supervisor is not None:
            supervisor.send(signal.SIGTERM)


def _wait(folder: RunFolder, patience_s: float) -> None:
    until = time.monotonic() + patience_s
    while folder.goes_on and time.monotonic() < until:
        time.sleep(POLL_S)


def _forget_unit(folder: RunFolder) -> None:
    """The unit of a lost supervisor stays behind as failed; once stopped, nobody needs it."""
    unit, program = folder.record().get("unit"), shutil.which("systemctl", path=search_path())
    if unit is not None and program is not None:
        command = [program, "reset-failed", f"{unit}.service"]
        subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=30, check=False)
