"""`serve NONCE WORKDIR`: one conversation with one client, on the standard streams."""

from __future__ import annotations

import contextlib
import errno
import importlib
import json
import os
import signal
import threading
from pathlib import Path
from typing import Any, Callable, Dict, NoReturn

from .arguments import Arguments
from .bootstrap import READY, REFUSED
from .conversation import Conversation
from .disk import free_bytes
from .early import Early
from .errors import AgentError, ClientGone, ExitCode
from .spare import spend_spare
from .variables import Variables
from .workdir import WorkDir

_FULL = (errno.ENOSPC, errno.EDQUOT)
_WAYS_OUT = ("lock", "pin", "prune", "stop")


def op_lock(conversation: Conversation, args: Arguments) -> Dict[str, Any]:
    conversation.take_lock(args.text("owner"), args.text("command"))
    return {"token": conversation.lock.token}


def op_free_lock(conversation: Conversation, _: Arguments) -> Dict[str, Any]:
    conversation.drop_lock()
    return {}


Operation = Callable[[Conversation, Arguments], Any]
OPERATIONS: Dict[str, str] = {
    "facts": "facts",
    "environment": "builds",
    "probe": "probe",
    "lock": "server",
    "unlock": "holders",
    "lock_fate": "holders",
    "holders": "holders",
    "free_lock": "server",
    "archive_begin": "releases",
    "archive_piece": "releases",
    "stage": "releases",
    "syntax": "syntax",
    "activate": "releases",
    "rollback": "rollback",
    "asset": "assets",
    "asset_begin": "assets",
    "asset_file": "assets",
    "asset_files": "assets",
    "asset_end": "assets",
    "check": "contract",
    "prepare": "contract",
    "tune": "tuning",
    "canary": "canary",
    "verdict": "gate",
    "verdicts": "rollback",
    "free": "launch",
    "launch": "launch",
    "runs": "runs",
    "status": "runs",
    "follow": "follow",
    "wait": "wait",
    "stop": "stop",
    "resumable": "resume",
    "files": "collect",
    "read": "collect",
    "pin": "retention",
    "checkpoint": "starts",
    "prune": "prune",
    "footprint": "footprint",
}
"""The module in which `op_NAME` is: imported when it is asked for, since a client waits for the first answer."""


def serve(nonce: str, workdir: str, beat_s: float, agent_file: str) -> NoReturn:
    """Talks until the client is gone; ends only through Conversation.close."""
    # from here on nothing but frames reaches the client, and nothing that is started inherits its streams
    source, sink = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    try:
        work = WorkDir.open(workdir)
    except OSError as error:
        refusal = json.dumps(_host_error(error, Path(agent_file)).to_json())
        os.write(sink, f"\n{REFUSED} {nonce} {refusal}\n".encode())
        raise SystemExit(1) from None
    os.write(sink, f"\n{READY} {nonce}\n".encode())
    conversation = Conversation(source, sink, work, beat_s, agent_file)
    early = Early(conversation, _result)
    conversation.arrived = early.arrived
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, _closer(conversation))
    conversation.start_threads()
    try:
        _answer(conversation, early)
        # the first answer does not wait for it
        threading.Thread(target=_keep_compiled, args=(Path(agent_file),), daemon=True).start()
        while True:
            _answer(conversation, early)
    except ClientGone as gone:
        conversation.close(str(gone))
    raise AssertionError("close does not return")


def _keep_compiled(agent_file: Path) -> None:
    from .compiled import keep_compiled

    # a full or read-only disk: the next start takes longer
    with contextlib.suppress(OSError):
        keep_compiled(agent_file)


def _closer(conversation: Conversation) -> "Callable[[int, object], None]":
    """A signal handler; in a thread of its own, since the main thread may hold what closing needs."""

    def handle(number: int, _: object) -> None:
        reason = f"the agent got {signal.Signals(number).name}"
        threading.Thread(target=conversation.close, args=(reason,), daemon=True).start()

    return handle


def _answer(conversation: Conversation, early: Early) -> None:
    try:
        request = conversation.next_request()
        conversation.answer(early.answer(request))
    except AgentError as error:
        conversation.refuse(error)
    except OSError as error:
        conversation.refuse(_host_error(error, conversation.work.root))
    except ClientGone:
        raise
    except Exception as error:  # a fault of ours ends the request, not the conversation
        import traceback

        conversation.refuse(
            AgentError(
                "internal",
                f"the agent has a fault: {type(error).__name__}: {error}",
                "agent on the host",
                "report it with the evidence",
                ExitCode.TRANSPORT,
                traceback.format_exc().splitlines(),
            )
        )


def _result(conversation: Conversation, request: Dict[str, Any]) -> Any:
    name = str(request.get("op"))
    if name not in OPERATIONS:
        raise AgentError(
            "request", f"there is no operation {name!r}", "request", f"one of: {', '.join(OPERATIONS)}", ExitCode.USAGE
        )
    operation: Operation = getattr(importlib.import_module(f".{OPERATIONS[name]}", __package__), f"op_{name}")
    args = Arguments(name, request)
    conversation.hide(Variables.from_arguments(args).masks)
    try:
        return operation(conversation, args)
    except OSError as error:
        if error.errno in _FULL and name in _WAYS_OUT and spend_spare(conversation.work.root):
            return operation(conversation, args)
        raise


def _host_error(error: OSError, root: Path) -> AgentError:
    where = str(error.filename or root)
    if error.errno in _FULL:
        return AgentError(
            "disk_full",
            f"no space left on the host: {free_bytes(root)} bytes free",
            where,
            "make room there",
            ExitCode.BLOCKED,
        )
    return AgentError(
        "host",
        f"the host refused: {error.strerror or error}",
        where,
        "check the work directory and its rights",
        ExitCode.BLOCKED,
    )
