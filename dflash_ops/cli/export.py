"""`dflash-ops export`"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from dflash_ops.cli.common import HERE, OUTPUT_OPTIONS, RUNS_OPTION, Whole, command_end, options
from dflash_ops.deploy.events import Events
from dflash_ops.limits import MOST


@click.command("export")
@click.argument("run", required=False)
@click.option("--out", type=HERE, required=True, help="The folder to make; new or empty.")
@click.option("--step", type=Whole(0, MOST), help="Which checkpoint. Default: the newest that is here.")
@click.option(
    "--target",
    type=HERE,
    help="Where the target lies on this machine. Default: where the run's settings say.",
)
@click.option("--verifier", metavar="NAME", help="By what name or folder a server finds it. Default: where it lies.")
@options([RUNS_OPTION], OUTPUT_OPTIONS)
@command_end
def command(
    *,
    events: Events,
    result: dict[str, Any],
    run: str | None,
    out: Path,
    step: int | None,
    target: Path | None,
    verifier: str | None,
    runs: Path,
) -> None:
    """Write a collected checkpoint (default: the latest run's newest) in the speculators format: `vllm serve OUT`.

    As they are, checkpoints serve with SGLang, and with vLLM when --speculative-config names them.

    Example: dflash-ops export --out served --verifier Qwen/Qwen3-8B
    """
    from dflash_ops.deploy.exporting import export, find_source

    source = find_source(runs, run, step)
    result.update(run=source.run, checkpoint=str(source.checkpoint), folder=None)
    export(source, out, target=target, verifier=verifier)
    result["folder"] = str(out)
    events.emit("notice", text=f"{source.run}, {source.checkpoint.name}: {out}")
