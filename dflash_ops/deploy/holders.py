"""Who holds a host's lock and its devices; and taking the lock away."""

from __future__ import annotations

from typing import Any

from dflash_ops.deploy.events import Events
from dflash_ops.deploy.session import Session, owner
from dflash_ops.errors import ExitCode, OpsError
from dflash_ops.transport import Conversation

AGENTS = {
    "none": "nobody holds the host: there is nothing to take away",
    "gone": "its agent was gone; the host is free, and what was left of its jobs is ended",
    "ended": "its agent has ended, with all that it had started; the host is free",
    "killed": "its agent did not react and was killed, with all that it had started; the host is free",
    "stuck": "its agent cannot be killed (it waits for the kernel), so its devices may stay busy; the lock is free",
}


def tell_holders(conversation: Conversation, events: Events, *, runs: bool) -> dict[str, Any]:
    """Events `lock`, `lease` (those of runs only where asked for) and `occupied`; the agent's answer."""
    answer = conversation.request("holders")
    # a host that leaves one out holds none
    holders: dict[str, Any] = {"lock": answer.get("lock")}
    holders.update((name, answer.get(name) or []) for name in ("leases", "occupied"))
    if holders["lock"] is not None:
        events.emit("lock", **holders["lock"])
    for lease in holders["leases"]:
        if runs or lease["kind"] != "run":
            events.emit("lease", **lease)
    for gpu in holders["occupied"]:
        events.emit("occupied", **gpu)
    return holders


def unlock(session: Session, events: Events, *, force: bool) -> str:
    """Takes the host's lock away; what became of its owner's agent. Raises OpsError (exit 9) where it lives."""
    with session.conversation() as conversation:
        # what is taken away is what was shown, or nothing
        lock = tell_holders(conversation, events, runs=True)["lock"]
        token = lock["token"] if force and lock is not None else None
        try:
            done = conversation.request("unlock", {"owner": owner(), "token": token})
        except OpsError as error:
            if error.exit_code is ExitCode.LOCKED:
                error.fix = (
                    "wait for it, or `dflash-ops unlock --force`: ends its canary or upload at once; no run is touched"
                )
            raise
    agent = str(done["agent"])
    whose = f"took the lock from {done['lock']['owner']}: " if done["lock"] else ""
    events.emit("unlocked", agent=agent, lock=done["lock"], what=f"{whose}{AGENTS[agent]}")
    return agent
