"""`dflash-ops prepare`: the data of a playbook, made by a run of their own, where its deploys find them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_ops.agent.prepared import prepares_on_gpu
from dflash_ops.config import Playbook
from dflash_ops.deploy.deploying import PREPARE, Choices, Outcome, begin_record, launch, see_to_the_end, staged
from dflash_ops.deploy.events import Events
from dflash_ops.deploy.records import new_run_id
from dflash_ops.deploy.session import Session
from dflash_ops.deploy.stages import Stages


@dataclass(frozen=True)
class Preparing:
    """A run that prepares data: its id, its folder here, where the data will lie there, and its policy."""

    run: str
    folder: Path
    data: str
    policy: dict[str, Any]

    def see_to_the_end(self, session: Session, choices: Choices, outcome: Outcome) -> None:
        """Follows and collects, unless the person walks away. Raises OpsError (exit 8) where it failed."""
        if choices.detach:
            session.events.emit(
                "notice", text=f"it goes on, whoever is connected: `dflash-ops tail-logs -f {self.run}`"
            )
        see_to_the_end(session, self.run, self.folder, choices, outcome, policy=self.policy)
        if outcome.state == "SUCCEEDED":
            outcome.prepared = self.data
            session.events.emit("prepared", path=self.data, reused=False)


def prepare(session: Session, playbook: Playbook, events: Events, choices: Choices, outcome: Outcome) -> None:
    """As `deploy`, up to the data: a canary proves training, and is not asked for.

    Raises OpsError with the exit code of the stage that stopped it; the run itself failing is exit 8.
    """
    with staged(session, without_gpu(playbook), choices, outcome, PREPARE) as stages:
        begun = begin(stages, playbook.run.policy(), choices, outcome)
    if begun is not None:
        begun.see_to_the_end(session, choices, outcome)


def without_gpu(playbook: Playbook) -> Playbook:
    """The playbook as `prepare` needs it: where an endpoint answers and no hidden states are made, no GPU is asked for,
    and none has to be there. What the data depend on is as it was.
    """
    if _uses_gpu(playbook):
        return playbook
    anywhere = {"require_cuda": False, "gpus": "all", "drafter_devices": "auto", "target_devices": "auto"}
    workload = playbook.workload.model_copy(update={**anywhere, "strategy": "eager"})
    return playbook.model_copy(update={"workload": workload})


def _uses_gpu(playbook: Playbook) -> bool:
    return prepares_on_gpu(playbook.model_dump(mode="json", include={"workload", "training"}))


def begin(stages: Stages, policy: dict[str, Any], choices: Choices, outcome: Outcome) -> Preparing | None:
    """Launches the run that prepares what is staged; None where the data are there, or none are needed."""
    stages.doctor(prepares=True)
    key = stages.to_prepare()
    if key is None:
        if stages.prepared is None:
            stages.events.emit("notice", text="nothing was launched: the data of this playbook need no preparation")
        outcome.prepared = stages.prepared
        return None
    if _uses_gpu(stages.playbook):
        stages.refuse_busy()
    run = new_run_id(f"{stages.playbook.name}-prepare")
    folder = begin_record(stages, run, choices, outcome, PREPARE)
    # it makes no steps that could be waited for
    policy = {**policy, "probation_steps": 0}
    result = launch(stages, run, choices, outcome, policy=policy, key=key)
    return Preparing(run, folder, str(result["prepares"]), policy)
