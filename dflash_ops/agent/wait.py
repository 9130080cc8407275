"""Waiting for a run's end: nothing but heartbeats crosses the wire meanwhile."""

from __future__ import annotations

import time
from typing import Any, Dict

from .arguments import Arguments
from .conversation import Conversation
from .runs import RunState, find_run

_LOOK_S = 0.2
_FOR_EVER = float(10 * 365 * 86400)


def op_wait(conversation: Conversation, args: Arguments) -> Dict[str, Any]:
    """The run's summary once it has ended, or after `timeout_s`; `timed_out` tells which."""
    folder = find_run(conversation.work, args.optional_run())
    until = time.monotonic() + args.seconds("timeout_s", _FOR_EVER)
    if folder.state() is RunState.RUNNING:
        conversation.event("waiting", run=folder.run)
    while folder.state() is RunState.RUNNING:
        if time.monotonic() >= until:
            return {**folder.summary(), "timed_out": True}
        time.sleep(_LOOK_S)
    return {**folder.summary(), "timed_out": False}
