"""`dflash-ops deploy`"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from dflash_ops.cli.common import (
    HOST_OPTIONS,
    OUTPUT_OPTIONS,
    PLAYBOOK_OPTIONS,
    RUNS_OPTION,
    Whole,
    chosen_host,
    command_end,
    options,
)
from dflash_ops.deploy.events import Events
from dflash_ops.limits import MOST_RESTARTS

RESTART = click.option(
    "--restart",
    "restarts",
    type=Whole(0, MOST_RESTARTS),
    metavar="N",
    help="The host starts the run again when it crashes, N times at most. As --set run.restarts=N.",
)
AGAIN = click.option("--again", is_flag=True, help="Run the canary even where its last verdict still holds.")


LAUNCH_OPTIONS = [
    RESTART,
    AGAIN,
    click.option(
        "--detach", is_flag=True, help="Return once the run has made its first steps (`run.probation_steps`)."
    ),
    click.option(
        "--skip-canary", is_flag=True, help="Launch without proof. Needs --reason; the run carries it for ever."
    ),
    click.option("--reason", metavar="TEXT", help="Why the canary is skipped."),
]


def with_restarts(sets: tuple[str, ...], restarts: int | None) -> tuple[str, ...]:
    return sets if restarts is None else (*sets, f"run.restarts={restarts}")


def skip_reason(skip_canary: bool, reason: str | None) -> str | None:
    """The written reason, or None where the canary is not skipped. Raises UsageError for one without the other."""
    said = (reason or "").strip()
    if skip_canary != (reason is not None) or skip_canary != bool(said):
        raise click.UsageError("--skip-canary and --reason TEXT go together, and the reason must say something")
    if not said.isprintable():
        # the run carries it for ever: in files, on screens, in reports
        raise click.UsageError(f"--reason {said!r} must be one line of text")
    return said or None


@click.command("deploy")
@options(HOST_OPTIONS, PLAYBOOK_OPTIONS, [RUNS_OPTION, *LAUNCH_OPTIONS], OUTPUT_OPTIONS)
@click.option(
    "--release",
    metavar="DIGEST",
    help="A release on the host instead of a build: current, previous, or the beginning of its digest.",
)
@click.option(
    "--init-from",
    metavar="CHECKPOINT",
    help="Begin with these weights, all else fresh: a checkpoint's folder here, or RUN or RUN:STEP on the host.",
)
@click.option("--dry-run", is_flag=True, help="Print the plan; touch nothing.")
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
    again: bool,
    release: str | None,
    init_from: str | None,
    dry_run: bool,
    detach: bool,
    skip_canary: bool,
    reason: str | None,
) -> None:
    """Build, check, stage, prove and launch; follow, and bring everything home.

    Leaving it (Ctrl-C, a closed laptop) never stops a launched run.

    Example: dflash-ops deploy --host ct200 --playbook train --set training.steps=2000
    """
    from contextlib import ExitStack

    from dflash_ops.deploy.naming import refuse_no_release
    from dflash_ops.deploy.session import Session

    said = skip_reason(skip_canary, reason)
    if release is not None:
        refuse_no_release(release, asks_host=not dry_run)
    first = None
    if init_from is not None:
        from dflash_ops.deploy.first_weights import parsed

        first = parsed(init_from)
    chosen = chosen_host(events, host, inventory)
    with ExitStack() as stack:
        session = None if dry_run else stack.enter_context(Session(chosen, events))
        if session is not None:
            # the host begins while the rest is imported, read and built here
            session.open_ahead()

        from dflash_ops.config import load_playbook
        from dflash_ops.deploy.deploying import Choices, Outcome, deploy
        from dflash_ops.deploy.first_weights import Here, OnHost, begun, with_asset

        loaded = load_playbook(playbook, sets=with_restarts(sets, restarts))
        on_host = first if isinstance(first, OnHost) else None
        choices = Choices(runs=runs, detach=detach, again=again, skip_reason=said, release=release, first=on_host)
        if session is None:
            from dflash_ops.deploy.planning import plan

            planned = loaded if first is None else begun(loaded, str(first))
            events.emit("plan", steps=plan(chosen, planned, choices))
            return
        outcome = Outcome()
        try:
            if isinstance(first, Here):
                loaded = stack.enter_context(with_asset(loaded, first))
            deploy(session, loaded, events, choices, outcome)
        finally:
            result.update(
                release=outcome.release or None,
                verdict=outcome.verdict,
                run=outcome.run,
                state=outcome.state,
                folder=str(outcome.folder) if outcome.folder else None,
            )
