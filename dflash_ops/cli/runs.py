"""`dflash-ops runs`"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from dflash_ops.cli.common import HOST_OPTIONS, OUTPUT_OPTIONS, chosen_host, command_end, options
from dflash_ops.deploy.events import Events


@click.command("runs")
@options(HOST_OPTIONS, OUTPUT_OPTIONS)
@command_end
def command(*, events: Events, result: dict[str, Any], host: str | None, inventory: Path | None) -> None:
    """The runs on a host, newest first.

    Example: dflash-ops runs --host ct200
    """
    from dflash_ops.deploy.session import Session

    chosen = chosen_host(events, host, inventory)
    with Session(chosen, events) as session, session.conversation() as conversation:
        found = conversation.request("runs")["runs"]
    for one in found:
        events.emit("run", **one)
    if not found:
        events.emit(
            "notice",
            text=f"no runs on {chosen.name} yet: `dflash-ops deploy --host {chosen.name}` starts one",
        )
    result["runs"] = [one["run"] for one in found]
