"""Telling somebody what became of a run, from its host: nobody need be connected.

A command (the event as JSON on its standard input) or a webhook (the same, posted). It happens in children of the
supervisor, so that it delays nothing; what went wrong stands in supervisor.log and, the last of it, in untold.json,
which `status` shows. A webhook's URL may be a secret: it
lies in notify.json of the run, which is never collected or read out, and is shown nowhere.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict, Optional, Set, Tuple

from .accounts import Account, find_account, popen_options
from .arguments import Arguments
from .children import fork, say
from .errors import AgentError, ExitCode
from .files import read_json, write_json
from .processes import signal_group
from .pythons import base_environment
from .runs import UNTOLD, RunFolder

FILE = "notify.json"
COMMAND_TIME_S = 10.0
_OUTPUT_BYTES = 64 * 1024
"""Of a command's output in supervisor.log."""
_REQUEST_TIME_S = 10.0
_PAUSES_S = (1.0, 3.0, 9.0)
"""Before each further try of a webhook."""
LONGEST_S = (len(_PAUSES_S) + 1) * _REQUEST_TIME_S + sum(_PAUSES_S) + 5.0
_TRY_AGAIN = (408, 425, 429)


@dataclass(frozen=True)
class Notify:
    """One of the two: a command, or the URL of a webhook."""

    command: Tuple[str, ...] = ()
    webhook: Optional[str] = field(default=None, repr=False)

    @classmethod
    def from_arguments(cls, args: Arguments) -> "Optional[Notify]":
        """From `notify` of a request; AgentError `request` that never shows a value."""
        given = args.optional_table("notify")
        if not given:
            return None
        command, webhook = given.get("command"), given.get("webhook")
        if isinstance(command, list) and command and all(_is_text(word) for word in command) and webhook is None:
            return cls(command=tuple(command))
        if _is_text(webhook) and str(webhook).startswith(("http://", "https://")) and command is None:
            return cls(webhook=webhook)
        raise AgentError(
            "request",
            "notify must have either `command` (a list of words) or `webhook` (an http or https URL)",
            f"request {args.op}",
            "see docs/agent-protocol.md",
            ExitCode.USAGE,
        )

    @classmethod
    def of_run(cls, folder: Path) -> "Optional[Notify]":
        return cls.from_arguments(Arguments(FILE, {"notify": read_json(folder / FILE)}))

    def keep(self, folder: Path) -> None:
        value = {"command": list(self.command)} if self.command else {"webhook": self.webhook}
        write_json(folder / FILE, value)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value) and "\0" not in value


class Notifier:
    """The supervisor's side: one child for each event."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self.children: Set[int] = set()

    def tell(self, event: str, reason: str) -> None:
        """At once, and never to the harm of the run: whatever goes wrong is said in supervisor.log."""
        try:
            notify = Notify.of_run(self._folder.path)
            if notify is not None:
                facts, record = self._facts(event, reason), self._folder.record()
                self.children.add(fork(lambda: self._deliver(notify, facts, record)))
        except Exception as error:
            say(f"nobody was told of {event}: {type(error).__name__}: {error}")

    def _facts(self, event: str, reason: str) -> Dict[str, Any]:
        known = self._folder.summary()
        last, state, host = known["last"] or {}, known["state"], socket.gethostname()
        return {
            "v": 1,
            "event": event,
            "time": time.time(),
            "host": host,
            **{key: known[key] for key in ("run", "playbook", "release", "state", "devices")},
            "step": last.get("step"),
            "loss": last.get("loss"),
            "reason": reason or None,
            "starts_again": self._folder.starts_again,
            "text": f"run {self._folder.run} on {host}: {state}" + (f", {reason}" if reason else ""),
        }

    def _deliver(self, notify: Notify, event: Dict[str, Any], record: Dict[str, Any]) -> None:
        data = json.dumps(event).encode() + b"\n"
        problem = _run(notify.command, data, record) if notify.webhook is None else _post(notify.webhook, data)
        if problem is not None:
            say(f"notify: {problem}")
            told = {"v": 1, "time": time.time(), "event": event["event"], "what": problem}
            # a full disk may be what it is about
            with contextlib.suppress(OSError):
                write_json(self._folder.path / UNTOLD, told)

    def reaped(self, pid: int) -> None:
        self.children.discard(pid)


def unusable(command: str, python: str, account: Optional[Account]) -> Optional[str]:
    """Why `command` (its first word) cannot be run for `notify`; None where it can, as far as its file tells."""
    found = shutil.which(
        os.path.join("/", command) if "/" in command else command, path=base_environment(python, account)["PATH"]
    )
    return None if found else f"{command} is not there, or cannot be executed"


def _run(command: Tuple[str, ...], data: bytes, record: Dict[str, Any]) -> Optional[str]:
    """As the job's user, in an environment of its own; the beginning of its output goes to supervisor.log.

    Returns what went wrong.
    """
    account, problem = find_account(record.get("user")), None
    reading, writing = os.pipe()
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=writing,
            stderr=writing,
            cwd="/",
            env=base_environment(str(record["python"]), account),
            start_new_session=True,
            **popen_options(account),
        )
    except OSError as error:
        return f"{command[0]} cannot be run: {error.strerror}"
    finally:
        os.close(writing)
    told = threading.Thread(target=_tell_beginning, args=(reading,), daemon=True)
    told.start()
    try:
        process.communicate(data, timeout=COMMAND_TIME_S)
    except subprocess.TimeoutExpired:
        problem = f"{command[0]} was killed: it took more than {COMMAND_TIME_S:g} s"
    finally:
        signal_group(process.pid, signal.SIGKILL)
        process.wait()
        # a stranger that left the group may hold the pipe for ever
        told.join(1)
    if process.returncode > 0:
        problem = f"{command[0]} ended with exit code {process.returncode}"
    return problem


def _tell_beginning(reading: int) -> None:
    """All of it is read, so that nothing waits; what is too much is dropped, so that nothing fills the disk."""
    left = _OUTPUT_BYTES
    while data := os.read(reading, 65536):
        with contextlib.suppress(OSError):
            os.write(1, data[:left])
        if left and len(data) >= left:
            say(f"\nnotify: what it printed after {_OUTPUT_BYTES} bytes is left out")
        left = max(0, left - len(data))


def _post(url: str, data: bytes) -> Optional[str]:
    """Returns what went wrong, at last."""
    for pause in (*_PAUSES_S, None):
        problem, worth_it = _try_to_post(url, data)
        if problem is None or pause is None or not worth_it:
            break
        time.sleep(pause)
    return None if problem is None else f"the webhook was not reached: {problem}"


def _try_to_post(url: str, data: bytes) -> Tuple[Optional[str], bool]:
    """What was wrong (never the URL, which an exception's own words may hold), and whether another try may help."""
    # only where it is needed: it loads half the standard library
    import urllib.error
    import urllib.request

    try:
        headers = {"Content-Type": "application/json", "User-Agent": "dflash-ops"}
        request = urllib.request.Request(url, data, headers)  # noqa: S310 -- from_arguments lets http and https in
        with urllib.request.urlopen(request, timeout=_REQUEST_TIME_S):  # noqa: S310
            return None, False
    except urllib.error.HTTPError as error:
        return f"it answered {error.code}", error.code >= 500 or error.code in _TRY_AGAIN
    except OSError as error:
        reason = getattr(error, "reason", error)
        return getattr(reason, "strerror", None) or type(reason).__name__, True
    except Exception as error:
        return type(error).__name__, False
