"""Types commands of dflash-ops fast: a process that has imported everything once and forks for each command.

    python -m tests.typist_process [CLOCK]

Reads one JSON object a line: `{"id", "words", "cwd", "environment", "out", "err", "beat"}`; says `{"id", "pid"}` when
the command has begun and `{"id", "code"}` when it has ended (negative: killed by that signal). The command is a process
of its own, as it is for a person; what is not as for a person is said here, and nowhere in dflash_ops:

* where `beat` is given, heartbeats of so many seconds and short pauses before another try: a dead link is noticed soon;
* with CLOCK, the agent that it sends reads Unix time through that file (see `faults/clock.py`).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import select
import signal
import sys
from typing import Any, NoReturn

# all that a command imports while it runs
import fabric  # noqa: F401
import paramiko  # noqa: F401

from dflash_ops.agent import bundle
from dflash_ops.cli import COMMANDS, main
from dflash_ops.deploy import reconnect, session
from dflash_ops.transport import Conversation, local, pct, ssh  # noqa: F401
from tests.faults.clock import agent_reads_time_from

for command in COMMANDS:
    importlib.import_module(f"dflash_ops.cli.{command.replace('-', '_')}")
for module in ("deploying", "collecting", "report", "stages"):
    importlib.import_module(f"dflash_ops.deploy.{module}")

RETRY_S = (0.2, 0.5, 1, 2)


def say(**values: object) -> None:
    os.write(1, json.dumps(values).encode() + b"\n")


def become(order: dict[str, Any]) -> NoReturn:
    """This process is the command from here on."""
    code = 1
    try:
        for number in (signal.SIGCHLD, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL if number == signal.SIGCHLD else signal.default_int_handler)
        signal.set_wakeup_fd(-1)
        os.chdir(order["cwd"])
        os.environ.clear()
        os.environ.update(order["environment"])
        for name, number in ((os.devnull, 0), (order["out"], 1), (order["err"], 2)):
            flags = os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT | os.O_APPEND
            os.dup2(os.open(name, flags, 0o600), number)
        if order["beat"] is not None:
            session.Conversation = functools.partial(Conversation, beat=order["beat"])  # type: ignore[misc,assignment]
            reconnect.RETRY_S = RETRY_S  # type: ignore[assignment]
        main(order["words"])
    except SystemExit as done:
        code = done.code if isinstance(done.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def report_the_dead(running: dict[int, int]) -> None:
    for pid in list(running):
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            say(id=running.pop(pid), code=os.waitstatus_to_exitcode(status))


def serve(clock: str | None) -> None:
    if clock is not None:
        agent_reads_time_from(clock, bundle)
    bundle.agent_bundle()
    reading, writing = os.pipe()
    for end in (reading, writing):
        os.set_blocking(end, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    running: dict[int, int] = {}
    rest = b""
    while True:
        ready, _, _ = select.select([0, reading], [], [])
        if reading in ready:
            os.read(reading, 4096)
            report_the_dead(running)
        if 0 not in ready:
            continue
        data = os.read(0, 65536)
        if not data:
            break
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            order = json.loads(line)
            sys.stdout.flush()
            pid = os.fork()
            if pid == 0:
                become(order)
            running[pid] = order["id"]
            say(id=order["id"], pid=pid)
    for pid in running:
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    serve(sys.argv[1] if len(sys.argv) > 1 else None)
