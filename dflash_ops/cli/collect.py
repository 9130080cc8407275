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
@command_end
def command(
    *,
    events: Events,
    result: dict[str, Any],
    run: str | None,
    host: str | None,
    inventory: Path | None,
    runs: Path,
) -> None:
    """Bring a run's logs, metrics and complete checkpoints home (default: the latest run); also while it goes on.

    Example: dflash-ops collect
    """
    from dflash_ops.deploy.deploying import bring_home
    from dflash_ops.deploy.records import open_record
    from dflash_ops.deploy.session import Session

    chosen = chosen_host(events, host, inventory)
    with Session(chosen, events) as session:
        with session.conversation() as conversation:
            status = conversation.request("status", {"run": run})
        folder = open_record(
            runs,
            status["run"],
            {
                "host": chosen.name,
                "playbook": status["playbook"],
                "release": status["release"],
                "skipped_canary": status["skipped_canary"],
            },
        )
        result.update(run=status["run"], state=status["state"], folder=str(folder.resolve()))
        bring_home(session, status["run"], folder, events, status)
