"""`dflash-ops collect`"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from dflash_ops.cli.common import HOST_OPTIONS, OUTPUT_OPTIONS, RUNS_OPTION, chosen_host, command_end, options
from dflash_ops.deploy.events import Events


@click.command("collect")
@click.argument("run", required=False)
@options(HOST_OPTIONS, [RUNS_OPTION], OUTPUT_OPTIONS)
@click.option("-f", "--follow", is_flag=True, help="Go on until the run has ended: each new checkpoint as it appears.")
@click.option("--last", is_flag=True, help="Of the checkpoints only the newest.")
@click.option(
    "--optimizer",
    is_flag=True,
    help="The optimizer state too: what a resumed run needs, several times the size of the weights.",
)
@command_end
def command(
    *,
    events: Events,
    result: dict[str, Any],
    run: str | None,
    host: str | None,
    inventory: Path | None,
    runs: Path,
    follow: bool,
    last: bool,
    optimizer: bool,
) -> None:
    """Bring a run's logs, metrics and complete checkpoints home (default: the latest run); also while it goes on.

    What is here already stays as it is. Safe to interrupt and to type again: it goes on where it was.

    Example: dflash-ops collect --follow
    """
    from dflash_ops.deploy.collecting import Choice
    from dflash_ops.deploy.endings import tell_next
    from dflash_ops.deploy.homecoming import bring_home, follow_home
    from dflash_ops.deploy.records import record_of
    from dflash_ops.deploy.session import Session

    chosen = chosen_host(events, host, inventory, run=run)
    with Session(chosen, events) as session:
        with session.conversation() as conversation:
            status = conversation.request("status", {"run": run})
        folder = record_of(runs, status, chosen.name)
        result.update(run=status["run"], state=status["state"], folder=str(folder))
        choice = Choice(optimizer=optimizer, last=last)
        if follow:
            home = follow_home(session, status["run"], runs, choice)
        else:
            home = bring_home(session, status["run"], folder, events, choice)
        status = home.status
        folder = runs / status["run"]
        result.update(run=status["run"], state=status["state"], folder=str(folder))
        tell_next(events, status)
        home.refuse_damaged()
