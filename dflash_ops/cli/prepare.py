"""`dflash-ops prepare`"""

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
from dflash_ops.cli.deploy import RESTART, with_restarts
from dflash_ops.deploy.events import Events

DETACH = click.option("--detach", is_flag=True, help="Return once the run has begun.")


@click.command("prepare")
@options(HOST_OPTIONS, PLAYBOOK_OPTIONS, [RUNS_OPTION, RESTART, DETACH], OUTPUT_OPTIONS)
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
    restarts: int | None,
    detach: bool,
) -> None:
    """Make a playbook's data on the host, in a run of their own: the target's answers, its hidden states.

    A deploy does this too, where they are missing. What takes hours is better a run: tail-logs, wait, status, stop and
    resume work on it, and a deploy of the same playbook finds what it made. Stopped or killed, it loses nothing.

    Example: dflash-ops prepare --host ct200 --playbook train --detach
    """
    from dflash_ops.deploy.session import Session

    chosen = chosen_host(events, host, inventory)
    with Session(chosen, events) as session:
        # the host begins while the rest is imported, read and built here
        session.open_ahead()

        from dflash_ops.config import load_playbook
        from dflash_ops.deploy.deploying import Choices, Outcome
        from dflash_ops.deploy.preparing import prepare

        loaded = load_playbook(playbook, sets=with_restarts(sets, restarts))
        outcome = Outcome()
        try:
            prepare(session, loaded, events, Choices(runs=runs, detach=detach), outcome)
        finally:
            result.update(
                release=outcome.release or None,
                prepared=outcome.prepared,
                run=outcome.run,
                state=outcome.state,
                folder=str(outcome.folder) if outcome.folder else None,
            )
