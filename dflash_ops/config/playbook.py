"""A playbook: which trainer, with which settings, under which limits."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from dflash_ops.config.asset import Asset
from dflash_ops.config.base import NAME, TEXT, Matches, Model
from dflash_ops.config.environment import Environment
from dflash_ops.config.places import bundled
from dflash_ops.config.training import Training
from dflash_ops.config.workload import Workload
from dflash_ops.limits import LARGEST_BYTES, LONGEST_H, LONGEST_S, MOST, MOST_RESTARTS

CONTRACT = 1
BUNDLED = "bundled"
KIB, MIB = 1024, 1024 * 1024
HOST_KEEPS = {
    "grace_s",
    "keep_last",
    "keep_best",
    "log_rotate_bytes",
    "log_max_bytes",
    "restarts",
    "restart_backoff_s",
    "probation_steps",
    "stall_s",
    "first_step_s",
}

Texts = Annotated[tuple[Annotated[str, TEXT], ...], Field(strict=False)]
Seconds = Annotated[int, Field(ge=1, le=LONGEST_S)]


class Trainer(Model):
    """The source that becomes the release."""

    source: Annotated[str, TEXT] = BUNDLED
    """bundled (the trainer that comes with dflash-ops), or a folder, relative to this file."""
    module: Annotated[str, Matches(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", "a Python module's dotted name")] = "trainer"
    """What `python -m` starts, in the release."""
    patches: Texts = ()
    """Unified diffs, applied in this order; relative to this file."""
    include: Texts = ()
    """Globs of files that go into the release though git does not track them; relative to the source."""

    @property
    def is_bundled(self) -> bool:
        return self.source == BUNDLED

    @property
    def folder(self) -> Path:
        """The source tree on this machine."""
        return bundled("trainer") if self.is_bundled else Path(self.source)


class Run(Model):
    """Limits of the stages around the training itself."""

    canary_max_age_h: Annotated[float, Field(gt=0, le=LONGEST_H)] = 24
    """Hours that a passing verdict holds (on the host's boot-time clock)."""
    grace_s: Annotated[int, Field(ge=0, le=LONGEST_S)] = 120
    """Seconds between SIGTERM and SIGKILL when a run is stopped: enough for a checkpoint."""
    keep_last: Annotated[int, Field(ge=1, le=MOST)] | None = 3
    """Newest checkpoints that stay on the host while the run goes on; null: all."""
    keep_best: Annotated[int, Field(ge=0, le=MOST)] = 1
    """Best checkpoints that stay besides: by held-out tau, else held-out loss, else the training loss."""
    log_rotate_bytes: Annotated[int, Field(ge=64 * KIB, le=LARGEST_BYTES)] = 64 * MIB
    """Size at which a file of the run's log is followed by the next one."""
    log_max_bytes: Annotated[int, Field(ge=MIB, le=LARGEST_BYTES)] = 4096 * MIB
    """Most that is kept of a run's log on the host: then its oldest files go, never the first."""
    restarts: Annotated[int, Field(ge=0, le=MOST_RESTARTS)] = 0
    """How often the host starts a run again that crashed: from its last checkpoint, while the verdict holds."""
    restart_backoff_s: Annotated[float, Field(ge=0, le=LONGEST_S)] = 30
    """Seconds before the first restart; doubled for each that follows, up to an hour."""
    probation_steps: Annotated[int, Field(ge=0, le=MOST)] = 3
    """Recorded steps with a finite loss after which `deploy --detach` leaves the run alone (0: at once)."""
    stall_s: Annotated[int, Field(ge=0, le=LONGEST_S)] = 1800
    """Seconds without a metrics record, after the first step, that end the run (0: never). More than the training's
    `log_every` steps, its evaluation and its checkpoint take. A run of `prepare` may stand still for the longer of this
    and `first_step_s`."""
    first_step_s: Annotated[int, Field(ge=0, le=LONGEST_S)] = 3600
    """The same before the first step (loading, evaluation, compiling) and after the last (evaluation)."""
    prepare_timeout_s: Seconds = 3600
    """Seconds for the trainer's `prepare` within a deploy. `dflash-ops prepare` has no such limit."""
    tune_timeout_s: Seconds = 3600
    """Seconds for the trainer's `tune`: all strategies together."""
    check_timeout_s: Seconds = 300
    """Seconds for the trainer's `check`."""

    def policy(self) -> dict[str, Any]:
        """What the host must know to look after the run (docs/agent-protocol.md, `launch`)."""
        return self.model_dump(include=HOST_KEEPS)


class Playbook(Model):
    """What to train and how. The canary's verdict depends on `workload`, not on `training`."""

    version: Literal[1]
    """Of this file's format: 1."""
    name: Annotated[str, NAME]
    """Default: the file's name. Part of each run's id."""
    trainer: Trainer = Trainer()
    workload: Workload
    training: Training
    run: Run = Run()
    environment: Environment | None = None
    """The trainer's packages, made on the host from a lock. Left out: those that the host's `python` has."""
    assets: dict[Annotated[str, NAME], Asset] = Field({}, json_schema_extra={"additionalProperties": False})
    """Weights and datasets by name; `asset:NAME` is the value of target, data, prompts or init_from."""

    @field_validator("training")
    @classmethod
    def _decay_is_used(cls, training: Training, info: ValidationInfo) -> Training:
        workload = info.data.get("workload")
        if workload is not None and workload.loss_type == "dpace" and training.decay_gamma is not None:
            raise ValueError("loss_type is dpace, which makes its own weights; leave decay_gamma out")
        return training

    def settings(self, run: str | None, prepared: str | None, cache: str) -> dict[str, Any]:
        """The trainer contract's settings, ready for JSON. `prepared` and `cache` are paths on the host."""
        return {
            "contract": CONTRACT,
            "run": run,
            "workload": self.workload.model_dump(mode="json"),
            "training": self.training.model_dump(mode="json"),
            "prepared": prepared,
            "cache": cache,
        }
