"""Back to the last good release of a host."""

from __future__ import annotations

from typing import Any

from dflash_ops.config import Playbook
from dflash_ops.deploy.events import Events
from dflash_ops.deploy.session import Session, owner


def rollback(session: Session, playbook: Playbook, events: Events) -> dict[str, Any]:
    """`current` and `previous` after it. Raises OpsError (exit 2) where no earlier release passed on these devices."""
    workload = playbook.workload.model_dump(mode="json", include={"gpus", "require_cuda"})
    with session.conversation() as conversation:
        conversation.request("lock", {"owner": owner(), "command": "rollback"})
        done = conversation.request("rollback", {"workload": workload})
    events.emit("rolled_back", host=session.host.name, **done)
    return {"current": done["current"], "previous": done["previous"]}
