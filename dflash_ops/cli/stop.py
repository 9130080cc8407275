"""`dflash-ops stop`"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from dflash_ops.cli.common import HOST_OPTIONS, OUTPUT_OPTIONS, Whole, chosen_host, command_end, ledger_of, options
from dflash_ops.deploy.events import Events
from dflash_ops.limits import LONGEST_S


@click.command("stop")
@click.argument("run", required=False)
@options(HOST_OPTIONS, OUTPUT_OPTIONS)
@click.option(
    "--grace",
    "grace_s",
    type=Whole(0, LONGEST_S),
    help="Seconds for its checkpoint. Default: `run.grace_s` of its playbook.",
)
@command_end
def command(
    *,
    events: Events,
    result: dict[str, Any],
    run: str | None,
    host: str | None,
    inventory: Path | None,
    grace_s: int | None,
) -> None:
    """Checkpoint and stop a run (default: the latest): SIGTERM, after the grace SIGKILL; show that nothing is left.

    Example: dflash-ops stop 20261129-151233-quickstart-7f3a
    """
    from dflash_ops.deploy.history import keep_record
    from dflash_ops.deploy.session import Session
    from dflash_ops.errors import ExitCode, OpsError

    def phase(event: dict[str, Any]) -> None:
        if "run" in event:
            result["run"] = event["run"]
        events.emit("phase", phase=event["phase"], what=event["what"])

    chosen = chosen_host(events, host, inventory, run=run)
    with Session(chosen, events) as session, session.conversation() as conversation:
        status = conversation.request(
            "stop",
            # left out, the host takes the run's own
            {"run": run} if grace_s is None else {"run": run, "grace_s": grace_s},
            on_event=phase,
        )
    keep_record(events, ledger_of(events), chosen.name, status["run"])
    events.emit("run", **{key: value for key, value in status.items() if key not in ("remaining", "gpu_memory")})
    result.update({key: status[key] for key in ("run", "state", "remaining", "gpu_memory")})
    if status["remaining"]:
        raise OpsError(
            f"processes of run {status['run']} are still there: {status['remaining']}",
            exit_code=ExitCode.RUN_FAILED,
            kind="remaining",
            where=chosen.name,
            fix="a process in uninterruptible sleep (D) waits for the kernel: look at `dmesg` on the node",
        )
    for gpu in status["gpu_memory"] or ():
        if not gpu["freed"]:
            events.emit("notice", text=f"GPU {gpu['what']}")
    events.emit(
        "notice",
        text=f"no process of run {status['run']} is left; collect it: `dflash-ops collect {status['run']}`",
    )
