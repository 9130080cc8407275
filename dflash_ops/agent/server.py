"""`serve NONCE WORKDIR`: one conversation with one client, on the standard streams."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import threading
import traceback
from pathlib import Path
from typing import Any, Callable, Dict, NoReturn

from .arguments import Arguments
from .assets import op_asset, op_asset_begin, op_asset_end, op_asset_file
from .bootstrap import READY, REFUSED
from .builds import op_environment
from .canary import op_canary
from .collect import op_files, op_read
from .compiled import keep_compiled
from .contract import op_check, op_prepare
from .conversation import Conversation
from .errors import AgentError, ClientGone, ExitCode
from .facts import op_facts
from .follow import op_follow
from .footprint import op_footprint
from .gate import op_verdict
from .holders import op_holders, op_unlock
from .launch import op_free, op_launch
from .probe import op_probe
from .prune import op_prune
from .pythons import op_syntax
from .releases import op_activate, op_archive_begin, op_archive_piece, op_stage
from .resume import op_resumable
from .retention import op_pin
from .rollback import op_rollback, op_verdicts
from .runs import op_runs, op_status
from .spare import spend_spare
from .starts import op_checkpoint
from .stop import op_stop
from .tuning import op_tune
from .variables import Variables
from .wait import op_wait
from .workdir import WorkDir

_FULL = (errno.ENOSPC, errno.EDQUOT)
_WAYS_OUT = ("lock", "pin", "prune", "stop")


def op_lock(conversation: Conversation, args: Arguments) -> Dict[str, Any]:
    conversation.take_lock(args.text("owner"), args.text("command"))
    return {}


def op_free_lock(conversation: Conversation, _: Arguments) -> Dict[str, Any]:
    conversation.drop_lock()
    return {}


Operation = Callable[[Conversation, Arguments], Any]
OPERATIONS: Dict[str, Operation] = {
    "facts": op_facts,
    "environment": op_environment,
    "probe": op_probe,
    "lock": op_lock,
    "unlock": op_unlock,
    "holders": op_holders,
    "free_lock": op_free_lock,
    "archive_begin": op_archive_begin,
    "archive_piece": op_archive_piece,
    "stage": op_stage,
    "syntax": op_syntax,
    "activate": op_activate,
    "rollback": op_rollback,
    "asset": op_asset,
    "asset_begin": op_asset_begin,
    "asset_file": op_asset_file,
    "asset_end": op_asset_end,
    "check": op_check,
    "prepare": op_prepare,
    "tune": op_tune,
    "canary": op_canary,
    "verdict": op_verdict,
    "verdicts": op_verdicts,
    "free": op_free,
    "launch": op_launch,
    "runs": op_runs,
    "status": op_status,
    "follow": op_follow,
    "wait": op_wait,
    "stop": op_stop,
    "resumable": op_resumable,
    "files": op_files,
    "read": op_read,
    "pin": op_pin,
    "checkpoint": op_checkpoint,
    "prune": op_prune,
    "footprint": op_footprint,
}


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
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, _closer(conversation))
    conversation.start_threads()
    try:
        _answer(conversation)
        # the first answer does not wait for it
        threading.Thread(target=_keep_compiled, args=(Path(agent_file),), daemon=True).start()
        while True:
            _answer(conversation)
    except ClientGone as gone:
        conversation.close(str(gone))
    raise AssertionError("close does not return")


def _keep_compiled(agent_file: Path) -> None:
    # a full or read-only disk: the next start takes longer
    with contextlib.suppress(OSError):
        keep_compiled(agent_file)


def _closer(conversation: Conversation) -> "Callable[[int, object], None]":
    """A signal handler; in a thread of its own, since the main thread may hold what closing needs."""

    def handle(number: int, _: object) -> None:
        reason = f"the agent got {signal.Signals(number).name}"
        threading.Thread(target=conversation.close, args=(reason,), daemon=True).start()

    return handle


def _answer(conversation: Conversation) -> None:
    try:
        request = conversation.next_request()
        conversation.answer(_result(conversation, request))
    except AgentError as error:
        conversation.refuse(error)
    except OSError as error:
        conversation.refuse(_host_error(error, conversation.work.root))
    except ClientGone:
        raise
    except Exception as error:  # a fault of ours ends the request, not the conversation
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
    operation = OPERATIONS.get(name)
    if operation is None:
        raise AgentError(
            "request", f"there is no operation {name!r}", "request", f"one of: {', '.join(OPERATIONS)}", ExitCode.USAGE
        )
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
        status = os.statvfs(root)
        free = status.f_bavail * status.f_frsize
        return AgentError(
            "disk_full", f"no space left on the host: {free} bytes free", where, "make room there", ExitCode.BLOCKED
        )
    return AgentError(
        "host",
        f"the host refused: {error.strerror or error}",
        where,
        "check the work directory and its rights",
        ExitCode.BLOCKED,
    )
