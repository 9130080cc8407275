"""Who holds what on this host: its lock, its devices; and taking the lock away from one who does not give it back."""

from __future__ import annotations

import signal
import time
from typing import Any, Dict

from .arguments import Arguments
from .conversation import Conversation
from .devices import inventory
from .leases import leases
from .lock import Owner, holder, taken_from
from .occupied import occupied
from .orphans import clear_orphans

# an agent that lost its lock sees it at its next beat, and then kills what it had started
_SLACK_S = 6.0
_POLL_S = 0.05


def op_holders(conversation: Conversation, _: Arguments) -> Dict[str, Any]:
    """What this very conversation holds is left out."""
    work = conversation.work
    owner, held = holder(work), leases(work)
    if owner is not None and conversation.lock.is_mine(owner):
        owner = None
    devices = [device for lease in held for device in lease.devices or []]
    return {
        "lock": None if owner is None else owner.describe(),
        "leases": [lease.to_json() for lease in held],
        "occupied": occupied(work, inventory(), devices),
    }


def op_lock_fate(conversation: Conversation, args: Arguments) -> Dict[str, Any]:
    """What became of a lock that was held in a conversation which broke: `held` by it still, or `taken` by whom."""
    work, token = conversation.work, args.text("token")
    owner = holder(work)
    held = owner is not None and owner.token == token and owner.agent_lives is not False
    return {"held": held, "taken": taken_from(work, token)}


def op_unlock(conversation: Conversation, args: Arguments) -> Dict[str, Any]:
    """Takes the lock from its owner, ends that agent with all that it started, and lets the lock go.

    Without `token` (the living owner's, as `holders` shows it) only a lock whose owner is gone: AgentError `locked`.
    """
    work, token = conversation.work, args.optional_text("token")
    present = holder(work)
    if present is None:
        return {"lock": None, "agent": "none"}
    if token is None:
        present.refuse_if_alive()
    before = conversation.take_lock(args.text("owner"), "unlock", take_from=token or present.token)
    agent = "gone" if before is None else _end(before)
    clear_orphans(work)
    conversation.drop_lock()
    return {"lock": None if before is None else before.describe(), "agent": agent}


def _end(owner: Owner) -> str:
    """Waits until the owner's agent has ended itself, and kills it if it does not.

    `gone` (it was before), `ended`, `killed`, or `stuck` where the kernel does not let it die.
    """
    agent = owner.agent
    if agent is None or not owner.agent_lives:
        return "gone"
    until = time.monotonic() + owner.beat_s + _SLACK_S
    while agent.alive and time.monotonic() < until:
        time.sleep(_POLL_S)
    if not agent.alive:
        return "ended"
    agent.send(signal.SIGKILL)
    while agent.alive and time.monotonic() < until + _SLACK_S:
        time.sleep(_POLL_S)
    return "stuck" if agent.alive else "killed"
