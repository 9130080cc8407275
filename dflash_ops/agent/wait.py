"""Waiting for a run's end: nothing but heartbeats crosses the wire meanwhile."""

from __future__ import annotations

import time
from typing import Any, Dict

from .arguments import Arguments
from .conversation import Conversation
from .follow import tell_if_it_waits, tell_of_disk
from .runs import find_run

_LOOK_S = 0.2
_FOR_EVER = float(10 * 365 * 86400)


def op_wait(conversation: Conversation, args: Arguments) -> Dict[str, Any]:
    """The run's summary once it has ended and nobody waits to start it again, or after `timeout_s` (`timed_out`)."""
    folder = find_run(conversation.work, args.optional_run())
    until = time.monotonic() + args.seconds("timeout_s", _FOR_EVER)
    if folder.goes_on:
        conversation.event("waiting", run=folder.run)
    told, warned = False, tell_of_disk(conversation, folder)
    while folder.goes_on:
        if time.monotonic() >= until:
            return {**folder.summary(), "timed_out": True}
        told = told or tell_if_it_waits(conversation, folder)
        warned = warned or tell_of_disk(conversation, folder)
        time.sleep(_LOOK_S)
    return {**folder.summary(), "timed_out": False}
