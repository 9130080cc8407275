"""`dflash-ops prune`"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from dflash_ops.cli.common import HOST_OPTIONS, OUTPUT_OPTIONS, RUNS_OPTION, Whole, chosen_host, command_end, options
from dflash_ops.deploy.events import Events
from dflash_ops.limits import MOST

COUNT = Whole(0, MOST)


@click.command("prune")
@options(HOST_OPTIONS, [RUNS_OPTION], OUTPUT_OPTIONS)
@click.option("--keep-runs", type=COUNT, default=5, show_default=True, help="Newest runs that stay.")
@click.option("--keep-releases", type=COUNT, default=3, show_default=True, help="Newest releases that stay.")
@click.option("--keep-environments", type=COUNT, default=2, show_default=True, help="Newest environments that stay.")
@click.option("--keep-prepared", type=COUNT, default=2, show_default=True, help="Newest prepared data that stay.")
@click.option("--keep-assets", type=COUNT, default=2, show_default=True, help="Newest uploaded assets that stay.")
@click.option("--caches", is_flag=True, help="Compiled kernels and converted targets go too; made anew when needed.")
@click.option("--uncollected", is_flag=True, help="Old runs go though they are not whole on this workstation.")
@click.option("--dry-run", is_flag=True, help="Show what would go, and why everything else stays.")
@command_end
def command(
    *,
    events: Events,
    result: dict[str, Any],
    host: str | None,
    inventory: Path | None,
    runs: Path,
    keep_runs: int,
    keep_releases: int,
    keep_environments: int,
    keep_prepared: int,
    keep_assets: int,
    caches: bool,
    uncollected: bool,
    dry_run: bool,
) -> None:
    """Make room on a host: old runs that are whole here, old releases, environments, assets and prepared data.

    Never what a running run, or one that stays, has; never the current release, the previous one and the last one
    whose canary passed; nor the environment that was asked for last, and the last one whose canary passed. The
    optimizer state of a run that goes is nowhere any more: it cannot be resumed.

    Example: dflash-ops prune --host ct200 --dry-run
    """
    from dflash_ops.deploy.pruning import Limits, prune
    from dflash_ops.deploy.session import Session

    chosen = chosen_host(events, host, inventory)
    with Session(chosen, events) as session:
        limits = Limits(keep_runs, keep_releases, keep_environments, keep_prepared, keep_assets, caches)
        result.update(prune(session, events, runs, limits, uncollected=uncollected, dry_run=dry_run))
    events.emit("pruned", host=chosen.name, dry_run=dry_run, **result)
