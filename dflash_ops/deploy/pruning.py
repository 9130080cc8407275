"""Making room on a host: old runs that are home, releases, environments, assets, prepared data, agents, and caches."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_ops.deploy.collecting import is_home
from dflash_ops.deploy.events import Events
from dflash_ops.deploy.listing import Listing
from dflash_ops.deploy.session import Session, owner
from dflash_ops.errors import ExitCode, OpsError
from dflash_ops.transport import Conversation


@dataclass(frozen=True)
class Limits:
    """How many of each stay, the newest. `caches`: whether compiled kernels and converted targets go."""

    runs: int
    releases: int
    environments: int
    prepared: int
    assets: int
    caches: bool


def prune(
    session: Session, events: Events, runs: Path, limits: Limits, *, uncollected: bool, dry_run: bool
) -> dict[str, int]:
    """One event for each thing of the host: what becomes of it and why. Returns bytes that went (or would) and stay.

    A run that is not whole in `runs` stays, unless `uncollected`. Raises OpsError (exit 9) while another holds the
    host, and (exit 5) when something could not be removed.
    """
    with session.conversation() as conversation:
        if not dry_run:
            conversation.request("lock", {"owner": owner(), "command": "prune"})
        items = conversation.request(
            "prune",
            {
                "keep_runs": limits.runs,
                "keep_releases": limits.releases,
                "keep_environments": limits.environments,
                "keep_prepared": limits.prepared,
                "keep_assets": limits.assets,
                "caches": limits.caches,
                "collected": None if uncollected else _collected(conversation, events, runs, limits.runs),
                "dry_run": dry_run,
            },
        )["items"]
    for item in items:
        events.emit("prune", dry_run=dry_run, **item)
    stuck = [item for item in items if item["fate"] == "stuck"]
    if stuck:
        raise OpsError(
            f"{stuck[0]['path']} could not be removed: {stuck[0]['why']}"
            + (f" (and {len(stuck) - 1} more)" if len(stuck) > 1 else ""),
            exit_code=ExitCode.BLOCKED,
            kind="prune",
            where=session.host.name,
            fix="whose files are they? mend that, and run the same command again",
        )
    return {
        "freed_bytes": sum(item["bytes"] for item in items if item["fate"] == "goes"),
        "kept_bytes": sum(item["bytes"] for item in items if item["fate"] == "stays"),
    }


def _collected(conversation: Conversation, events: Events, runs: Path, newest: int) -> list[str]:
    """Of the runs that may go, those that are whole here: all but the optimizer state, verified once more."""
    found: list[dict[str, Any]] = conversation.request("runs")["runs"]
    names = [str(one["run"]) for one in found[newest:] if (runs / str(one["run"])).is_dir()]
    if names:
        events.emit("comparing", runs=len(names), folder=str(runs))
    return [name for name in names if is_home(Listing.of(conversation.request("files", {"run": name})), runs / name)]
