"""`dflash-ops wait`"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from dflash_ops.cli.common import HOST_OPTIONS, OUTPUT_OPTIONS, Whole, chosen_host, command_end, options
from dflash_ops.deploy.events import Events
from dflash_ops.limits import LONGEST_S


@click.command("wait")
@click.argument("run", required=False)
@options(HOST_OPTIONS, OUTPUT_OPTIONS)
@click.option(
    "--timeout",
    "timeout_s",
    type=Whole(0, LONGEST_S),
    metavar="SECONDS",
    help="Stop waiting after this long (exit code 10); the run goes on.",
)
@command_end
def command(
    *,
    events: Events,
    result: dict[str, Any],
    run: str | None,
    host: str | None,
    inventory: Path | None,
    timeout_s: int | None,
) -> None:
    """Wait until a run (default: the latest) has ended: exit code 0 if it SUCCEEDED or was STOPPED, 8 otherwise.

    A broken link is met again. Ctrl-C ends the waiting, never the run.

    Example: dflash-ops wait && dflash-ops collect
    """
    from dflash_ops.deploy.deploying import refuse_bad_end
    from dflash_ops.deploy.session import Session
    from dflash_ops.deploy.waiting import refuse_timeout, wait

    chosen = chosen_host(events, host, inventory, run=run)
    result["run"] = run
    with Session(chosen, events) as session:
        status = wait(session, run, timeout_s=timeout_s, on_run=lambda each: result.update(run=each))
    result.update(run=status["run"], state=status["state"])
    refuse_timeout(status, chosen.name)
    refuse_bad_end(status, chosen.name)
