"""`dflash-ops status`"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from dflash_ops.cli.common import HOST_OPTIONS, OUTPUT_OPTIONS, chosen_host, command_end, ledger_of, options
from dflash_ops.deploy.events import Events


@click.command("status")
@click.argument("run", required=False)
@options(HOST_OPTIONS, OUTPUT_OPTIONS)
@command_end
def command(
    *, events: Events, result: dict[str, Any], run: str | None, host: str | None, inventory: Path | None
) -> None:
    """One run (default: the latest on the host): state, last step, devices; and who else holds the host.

    Example: dflash-ops status
    """
    from dflash_ops.deploy.endings import tell_next
    from dflash_ops.deploy.history import status
    from dflash_ops.deploy.session import Session

    chosen = chosen_host(events, host, inventory, run=run)
    with Session(chosen, events) as session:
        found = status(session, events, ledger_of(events), run)
    if found is None:
        events.emit("notice", text=f"nothing has run on {chosen.name} yet")
    else:
        events.emit("run", **found)
        tell_next(events, found)
    result.update(run=found and found["run"], state=found and found["state"])
