"""`dflash-ops doctor`"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from dflash_ops.cli.common import (
    HOST_OPTIONS,
    OUTPUT_OPTIONS,
    PLAYBOOK_OPTIONS,
    chosen_host,
    command_end,
    options,
)
from dflash_ops.deploy.events import Events


@click.command("doctor")
@options(HOST_OPTIONS, PLAYBOOK_OPTIONS, OUTPUT_OPTIONS)
@command_end
def command(
    *,
    events: Events,
    result: dict[str, Any],
    host: str | None,
    inventory: Path | None,
    playbook: str,
    sets: tuple[str, ...],
) -> None:
    """What on this host blocks a run of this playbook, or will hurt later. Changes nothing there.

    The trainer's own check of the settings needs its release there: `deploy` and `canary` ask it.

    Example: dflash-ops doctor --host ct200
    """
    from dflash_ops.config import load_playbook
    from dflash_ops.deploy.assets import examine_assets
    from dflash_ops.deploy.doctor import refuse_blockers
    from dflash_ops.deploy.environments import look_at_environment
    from dflash_ops.deploy.examining import Subject, examine
    from dflash_ops.deploy.session import Session, facts

    chosen = chosen_host(events, host, inventory)
    loaded = load_playbook(playbook, sets=sets)
    with Session(chosen, events) as session, session.conversation() as conversation:
        known = facts(conversation)
        environment, found = look_at_environment(session, conversation, loaded, events)
        assets = examine_assets(conversation, loaded, events)
        python = environment.python if environment and environment.python else session.python
        planned = environment if environment and not environment.python else None
        subject = Subject(loaded, python, assets, planned)
        found += examine(session, conversation, known, subject, caches=True)
    for one in found:
        events.emit("diagnosis", **one.as_event())
    result["blockers"] = sum(one.level.value == "blocker" for one in found)
    refuse_blockers(found, chosen.name)
