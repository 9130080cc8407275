"""`dflash-ops unlock`"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from dflash_ops.cli.common import HOST_OPTIONS, OUTPUT_OPTIONS, chosen_host, command_end, options
from dflash_ops.deploy.events import Events


@click.command("unlock")
@options(HOST_OPTIONS, OUTPUT_OPTIONS)
@click.option("--force", is_flag=True, help="Take it from a living owner too: its command ends, its canary is killed.")
@command_end
def command(*, events: Events, result: dict[str, Any], host: str | None, inventory: Path | None, force: bool) -> None:
    """Show who holds the host's lock and its devices, and take the lock away where its owner is gone.

    Runs are never touched.

    Example: dflash-ops unlock --host ct200
    """
    from dflash_ops.deploy.holders import unlock
    from dflash_ops.deploy.session import Session

    chosen = chosen_host(events, host, inventory)
    with Session(chosen, events) as session:
        result["agent"] = unlock(session, events, force=force)
