"""`dflash-ops runs`"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from dflash_ops.cli.common import (
    HOST_OPTIONS,
    OUTPUT_OPTIONS,
    chosen_host,
    chosen_hosts,
    command_end,
    ledger_of,
    options,
)
from dflash_ops.deploy.events import Events


@click.command("runs")
@options(HOST_OPTIONS, OUTPUT_OPTIONS)
@click.option("--all", "every", is_flag=True, help="Runs and canaries of all hosts as this workstation knows them.")
@click.option("--rebuild", is_flag=True, help="Read every host of the inventory anew, then as --all.")
@command_end
def command(
    *, events: Events, result: dict[str, Any], host: str | None, inventory: Path | None, every: bool, rebuild: bool
) -> None:
    """The runs on a host, newest first; where it does not answer, what this workstation last knew of them.

    Example: dflash-ops runs --host ct200
    """
    from dflash_ops.deploy import history
    from dflash_ops.deploy.session import Session

    ledger = ledger_of(events)
    if every and host is not None:
        raise click.UsageError("--all is about all hosts: leave --host out")
    if every or rebuild:
        try:
            if rebuild:
                history.rebuild(chosen_hosts(host, inventory), events, ledger)
        finally:
            result["runs"] = history.everything(events, ledger)
        if not result["runs"] and not ledger.unusable:
            events.emit("notice", text="this workstation knows of no run yet")
        return
    chosen = chosen_host(events, host, inventory)
    with Session(chosen, events) as session:
        result["runs"] = history.runs(session, events, ledger)
    if not result["runs"]:
        events.emit(
            "notice",
            text=f"no runs on {chosen.name} yet: `dflash-ops deploy --host {chosen.name}` starts one",
        )
