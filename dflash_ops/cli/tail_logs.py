"""`dflash-ops tail-logs`"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

from dflash_ops.cli.common import HOST_OPTIONS, OUTPUT_OPTIONS, Whole, chosen_host, command_end, options
from dflash_ops.deploy.events import Events
from dflash_ops.limits import MOST

POLL_S = 1.0


@click.command("tail-logs")
@click.argument("run", required=False)
@options(HOST_OPTIONS, OUTPUT_OPTIONS)
@click.option(
    "-f",
    "--follow",
    "wait",
    is_flag=True,
    help="Go on until the run ends; without any run, wait for the first.",
)
@click.option("-n", "--lines", type=Whole(0, MOST), help="Only the last lines of what is there. Not with -f.")
@command_end
def command(
    *,
    events: Events,
    result: dict[str, Any],
    run: str | None,
    host: str | None,
    inventory: Path | None,
    wait: bool,
    lines: int | None,
) -> None:
    """Show a run's log from its first line, every line once (default: the latest run).

    Read-only: Ctrl-C ends the view, never the run. A broken link is met again where it was.

    Example: dflash-ops tail-logs -f
    """
    from collections import deque

    from dflash_ops.deploy.chain import through_restarts
    from dflash_ops.deploy.endings import tell_next
    from dflash_ops.deploy.follow import follow
    from dflash_ops.deploy.session import Session

    if wait and lines is not None:
        raise click.UsageError("-n shows what is there, -f what is to come: choose one")
    chosen = chosen_host(events, host, inventory, run=run)
    with Session(chosen, events) as session:
        found = _latest(session, events, wait) if run is None else run
        result["run"] = found
        if run is None:
            events.emit("notice", text=f"run {found} on {chosen.name}")
        kept: deque[str] = deque(maxlen=lines)

        def show(line: str) -> None:
            events.emit("log", source="run", line=line)

        def look(each: str | None) -> dict[str, Any]:
            return follow(
                session,
                each,
                wait=wait,
                on_line=show if lines is None else kept.append,
                on_step=lambda record: None,
            )

        if wait:
            for status in through_restarts(found, look, events):
                result.update(run=status["run"], state=status["state"])
            tell_next(events, status)
            return
        result["state"] = look(found)["state"]
        for line in kept:
            show(line)


def _latest(session: Any, events: Events, wait: bool) -> str:
    """The latest run's id; with `wait`, the first one to come where there is none yet."""
    from dflash_ops.errors import ExitCode, OpsError

    told = False
    with session.conversation() as conversation:
        while True:
            runs = conversation.request("runs")["runs"]
            if runs:
                return str(runs[0]["run"])
            if not wait:
                raise OpsError(
                    "there is no run yet",
                    exit_code=ExitCode.USAGE,
                    kind="no_run",
                    where=session.host.name,
                    fix=f"`dflash-ops deploy --host {session.host.name}`; `tail-logs -f` waits for the first",
                )
            if not told:
                events.emit("notice", text=f"no run on {session.host.name} yet; waiting for the first")
                told = True
            time.sleep(POLL_S)
