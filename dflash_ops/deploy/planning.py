"""`deploy --dry-run`: what would happen, in the order in which it would. Reads configuration only; touches no host."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dflash_ops.config import Host, Playbook
from dflash_ops.deploy.amounts import number

if TYPE_CHECKING:
    from dflash_ops.deploy.deploying import Choices


def plan(host: Host, playbook: Playbook, choices: Choices) -> list[dict[str, str]]:
    """One `{"stage", "what"}` for each stage."""
    trainer, workload, training = playbook.trainer, playbook.workload, playbook.training
    patches = f", then {number(len(trainer.patches), 'patch', 'patches')}" if trainer.patches else ""
    way = {
        "local": "is this machine",
        "ssh": f"by ssh {host.ssh.address}" if host.ssh else "",
        "pct": f"by ssh {host.ssh.address}, container {host.pct.id} ({host.pct.transfer})"
        if host.ssh and host.pct
        else "",
    }[host.transport]
    connect = ("connect", f"{host.name} {way}; lock {host.workdir}")
    if choices.release is None:
        steps = [
            ("build", f"{trainer.folder}{patches}: module {trainer.module}"),
            ("check", "syntax and compile-safety rules"),
            connect,
            ("stage", f"{host.workdir}/releases/<digest>, verified file by file; no bytes when it is there"),
        ]
    else:
        steps = [connect, ("stage", f"nothing is built or sent: release {choices.release}, if that host has it")]
    if playbook.environment is not None:
        wheels = playbook.environment.wheels
        source = f"wheels of {wheels.upload or wheels.path}" if wheels else "an index that the host reaches"
        made = f"made of {host.python} and {playbook.environment.lock} from {source}, unless it is there"
        steps.append(("environment", f"{host.workdir}/envs/<digest>, {made}"))
    python = host.python if playbook.environment is None else "its environment"
    steps.append(("doctor", f"disk, GPUs, {python}, the trainer's own check"))
    if playbook.assets:
        said = [
            f"{name} sent from {asset.upload}, unless it is there" if asset.upload else f"{name} at {asset.path}"
            for name, asset in playbook.assets.items()
        ]
        steps.append(("assets", f"{'; '.join(said)}; fingerprints checked"))
    if training.data is None:
        steps.append(
            (
                "prepare",
                f"{training.prompt_count} prompts of {training.prompts}, answered by {workload.target}",
            )
        )
    if choices.tune:
        steps.append(("tune", "every strategy measured"))
    elif workload.strategy == "auto":
        steps.append(("tune", "every strategy measured, unless the host has a table for these GPUs, torch and shapes"))
    steps.append(
        ("canary", f"SKIPPED: {choices.skip_reason}")
        if choices.skip_reason
        else (
            "canary",
            f"{number(workload.drafter_threads, 'drafter thread')}, {workload.strategy}, {workload.canary_steps} steps "
            f"against eager, {workload.rehearsal_steps} steps of the run itself",
        )
    )
    again = (
        f", started again at most {number(playbook.run.restarts, 'time')} when it crashes"
        if playbook.run.restarts
        else ""
    )
    first = f", from the weights of {training.init_from}" if training.init_from else ""
    steps.append(("launch", f"{training.steps} steps under a supervisor on the host{first}{again}"))
    if choices.detach:
        if playbook.run.probation_steps:
            steps.append(("probation", f"its first {playbook.run.probation_steps} steps, with a finite loss"))
    else:
        steps += [
            ("follow", "the log, until the run ends"),
            ("collect", f"{choices.runs}/<run>/, verified by sha256"),
        ]
    return [{"stage": stage, "what": what} for stage, what in steps]
