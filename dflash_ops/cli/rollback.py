"""`dflash-ops rollback`"""

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


@click.command("rollback")
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
    """Make the last release before this one current whose canary passed on the playbook's devices.

    No run is touched: each names its own release.

    Example: dflash-ops rollback --host ct200 --playbook train
    """
    from dflash_ops.config import load_playbook
    from dflash_ops.deploy.going_back import rollback
    from dflash_ops.deploy.session import Session

    chosen = chosen_host(events, host, inventory)
    loaded = load_playbook(playbook, sets=sets)
    with Session(chosen, events) as session:
        result.update(rollback(session, loaded, events))
