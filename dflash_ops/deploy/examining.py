"""What `doctor` asks a host before there is a release on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dflash_ops.config import Playbook
from dflash_ops.deploy.assets import Found
from dflash_ops.deploy.doctor import (
    Diagnosis,
    clock,
    examine_disk,
    examine_gpus,
    examine_holders,
    examine_host,
    examine_notify,
    examine_packages,
    examine_tools,
    examine_variables,
)
from dflash_ops.deploy.environments import HostEnvironment
from dflash_ops.deploy.node import examine_node
from dflash_ops.deploy.session import Facts, Session
from dflash_ops.transport import Conversation


def probe_arguments(session: Session, python: str) -> dict[str, Any]:
    notify = session.host.notify
    command = notify.command[0] if notify is not None and notify.command else None
    plain = session.variables.of_jobs.plain
    return {"python": python, "user": session.host.job_user, "environment": plain, "notify": command}


def footprint_arguments(playbook: Playbook, *, caches: bool = False, prepares: bool = False) -> dict[str, Any]:
    workload = playbook.workload.model_dump(mode="json")
    return {"module": playbook.trainer.module, "workload": workload, "caches": caches, "prepares": prepares}


@dataclass(frozen=True)
class Subject:
    """What is to run there. `python`: the trainer's; `planned`: an environment that is not made yet: then `python` is
    what it will be made of."""

    playbook: Playbook
    python: str
    assets: Mapping[str, Found]
    planned: HostEnvironment | None = None
    prepares: bool = False
    """It makes data, and no checkpoints."""


def examine(
    session: Session, conversation: Conversation, known: Facts, subject: Subject, *, caches: bool = False
) -> list[Diagnosis]:
    """`caches`: measure what they take, file by file."""
    playbook, assets = subject.playbook, subject.assets
    environment = conversation.request("probe", probe_arguments(session, subject.python))
    if subject.planned is not None:
        environment = {**environment, "packages": subject.planned.packages}
    footprint = conversation.request(
        "footprint", footprint_arguments(playbook, caches=caches, prepares=subject.prepares)
    )
    coming = sum(one.coming for one in assets.values())
    return [
        *examine_node(session.host, conversation.greeting),
        *examine_host(session.host, known.raw, environment, clock()),
        *examine_disk(session.host, known.raw, footprint, playbook, coming=coming, prepares=subject.prepares),
        *examine_variables(session.variables.of_jobs, "the trainer gets"),
        *(examine_variables(session.variables.of_pip, "the environment is made with") if playbook.environment else []),
        *examine_notify(environment),
        *examine_gpus(known.raw, playbook),
        *examine_packages(environment, playbook),
        *examine_tools(environment, playbook),
        *examine_holders(conversation.request("holders")),
        *(one.diagnosis for one in assets.values()),
    ]
