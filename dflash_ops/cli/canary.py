"""`dflash-ops canary`"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from dflash_ops.cli.common import (
    HOST_OPTIONS,
    OUTPUT_OPTIONS,
    PLAYBOOK_OPTIONS,
    RUNS_OPTION,
    chosen_host,
    command_end,
    options,
)
from dflash_ops.cli.deploy import AGAIN
from dflash_ops.deploy.events import Events

TUNE = click.option(
    "--tune", is_flag=True, help="Measure every strategy first, also where the host has a table; `auto` is the fastest."
)


@click.command("canary")
@options(HOST_OPTIONS, PLAYBOOK_OPTIONS, [RUNS_OPTION, AGAIN, TUNE], OUTPUT_OPTIONS)
@command_end
def command(
    *,
    events: Events,
    result: dict[str, Any],
    host: str | None,
    inventory: Path | None,
    playbook: str,
    sets: tuple[str, ...],
    runs: Path,
    again: bool,
    tune: bool,
) -> None:
    """Prove the workload on the host; launch nothing.

    A verdict that still holds for exactly this release, environment, workload, devices, driver and boot is reused.

    With strategy `auto` the strategies are measured first where the host has no table for these GPUs, torch and shapes.

    Example: dflash-ops canary --host ct200 --playbook train
    """
    from dflash_ops.deploy.session import Session

    chosen = chosen_host(events, host, inventory)
    with Session(chosen, events) as session:
        # the host begins while the rest is imported, read and built here
        session.open_ahead()

        from dflash_ops.config import load_playbook
        from dflash_ops.deploy.deploying import Choices, Outcome, prove

        loaded = load_playbook(playbook, sets=sets)
        outcome = Outcome()
        try:
            prove(session, loaded, events, Choices(runs=runs, again=again, tune=tune), outcome)
        finally:
            result.update(
                release=outcome.release or None,
                verdict=outcome.verdict,
                folder=str(outcome.folder) if outcome.folder else None,
            )
