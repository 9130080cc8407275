"""`dflash-ops resume`"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from dflash_ops.cli.common import HOST_OPTIONS, OUTPUT_OPTIONS, RUNS_OPTION, chosen_host, command_end, options
from dflash_ops.cli.deploy import LAUNCH_OPTIONS, skip_reason, with_restarts
from dflash_ops.deploy.events import Events


@click.command("resume")
@click.argument("run", required=False)
@options(HOST_OPTIONS)
@click.option(
    "--set",
    "sets",
    multiple=True,
    metavar="KEY=VALUE",
    help="Change one setting of the sections training and run; the workload stays.",
)
@click.option("--release", "rebuild", is_flag=True, help="Build the playbook's release anew and go on with that one.")
@click.option("--playbook", metavar="NAME|FILE", help="With --release: whose.")
@options([RUNS_OPTION, *LAUNCH_OPTIONS], OUTPUT_OPTIONS)
@command_end
def command(
    *,
    events: Events,
    result: dict[str, Any],
    run: str | None,
    host: str | None,
    inventory: Path | None,
    sets: tuple[str, ...],
    rebuild: bool,
    playbook: str | None,
    runs: Path,
    restarts: int | None,
    again: bool,
    detach: bool,
    skip_canary: bool,
    reason: str | None,
) -> None:
    """Go on with a run that has ended (default: the latest): stopped, failed, out of memory, lost to a reboot.

    A new run with the same release and settings begins at the last whole checkpoint of the old one. It passes the
    same stages as a deploy; the canary runs again where its verdict does not hold any more (after a reboot, say).
    A run that SUCCEEDED goes on with more steps: --set steps=N. A run of `prepare` goes on from what it has prepared.

    Example: dflash-ops resume 20261129-151233-quickstart-7f3a
    """
    from dflash_ops.deploy.deploying import Choices, Outcome
    from dflash_ops.deploy.resuming import Wish, resume
    from dflash_ops.deploy.session import Session

    if rebuild != (playbook is not None):
        raise click.UsageError("--release builds the release of --playbook: give both, or neither")
    choices = Choices(runs=runs, detach=detach, again=again, skip_reason=skip_reason(skip_canary, reason))
    chosen = chosen_host(events, host, inventory, run=run)
    outcome = Outcome()
    try:
        with Session(chosen, events) as session:
            resume(session, Wish(run, with_restarts(sets, restarts), playbook), events, choices, outcome)
    finally:
        result.update(
            release=outcome.release or None,
            verdict=outcome.verdict,
            parent=outcome.parent,
            prepared=outcome.prepared,
            run=outcome.run,
            state=outcome.state,
            folder=str(outcome.folder) if outcome.folder else None,
        )
