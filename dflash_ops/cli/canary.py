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


@click.command("canary")
@options(HOST_OPTIONS, PLAYBOOK_OPTIONS, [RUNS_OPTION, AGAIN], OUTPUT_OPTIONS)
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
) -> None:
    """Prove the workload on the host; launch nothing.

    A verdict that still holds for exactly this release, environment, workload, devices, driver and boot is reused.

    Example: dflash-ops canary --host ct200 --playbook train
    """
    from dflash_ops.config import load_playbook
    from dflash_ops.deploy.deploying import Choices, Outcome, prove
    from dflash_ops.deploy.session import Session

    chosen = chosen_host(events, host, inventory)
    loaded = load_playbook(playbook, sets=sets)
    outcome = Outcome()
    try:
        with Session(chosen, events) as session:
            prove(session, loaded, events, Choices(runs=runs, again=again), outcome)
    finally:
        result.update(
            release=outcome.release or None,
            verdict=outcome.verdict,
            folder=str(outcome.folder.resolve()) if outcome.folder else None,
        )
