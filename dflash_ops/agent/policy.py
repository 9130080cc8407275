"""How a run is looked after while nobody looks: the host's side of the playbook's section `run`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Dict, Optional

from .arguments import Arguments


@dataclass(frozen=True)
class Policy:
    """Kept in run.json as `policy`.

    `grace_s`: seconds between SIGTERM and SIGKILL. `keep_last` (None: all) and `keep_best`: checkpoints that stay while
    the run goes on. `log_rotate_bytes`: at this size a file of the log is followed by the next one.
    `log_max_bytes`: more than this is never kept of a run's log. `shared_gpus`: why GPUs that others use
    are no obstacle. `restarts`: how often a run that crashed is started again by its host. `restart_backoff_s`: seconds
    before the first time, doubled for each that follows. `stall_s` and `first_step_s`: seconds without a metrics
    record, after and before the first step, that end a run; 0: never. `probation_steps`: recorded steps after which a
    client leaves the run alone; kept for the run that goes on with it.
    """

    grace_s: float = 120.0
    keep_last: Optional[int] = 3
    keep_best: int = 1
    log_rotate_bytes: int = 64 * 1024 * 1024
    log_max_bytes: int = 4 * 1024 * 1024 * 1024
    shared_gpus: Optional[str] = None
    restarts: int = 0
    restart_backoff_s: float = 30.0
    stall_s: float = 1800.0
    first_step_s: float = 3600.0
    probation_steps: int = 3

    @classmethod
    def from_arguments(cls, args: Arguments) -> "Policy":
        """From `policy` of a request; AgentError `request` names the key that is wrong."""
        given = Arguments(f"{args.op} policy", args.optional_table("policy"))
        everything = given.values.get("keep_last", cls.keep_last) is None
        return cls(
            grace_s=given.seconds("grace_s", cls.grace_s),
            # the newest one is never removed
            keep_last=None if everything else max(1, given.size("keep_last", cls.keep_last)),
            keep_best=given.size("keep_best", cls.keep_best),
            log_rotate_bytes=given.size("log_rotate_bytes", cls.log_rotate_bytes),
            log_max_bytes=given.size("log_max_bytes", cls.log_max_bytes),
            shared_gpus=given.optional_text("shared_gpus"),
            restarts=given.size("restarts", cls.restarts),
            restart_backoff_s=given.seconds("restart_backoff_s", cls.restart_backoff_s),
            stall_s=given.seconds("stall_s", cls.stall_s),
            first_step_s=given.seconds("first_step_s", cls.first_step_s),
            probation_steps=given.size("probation_steps", cls.probation_steps),
        )

    @classmethod
    def of_record(cls, record: Dict[str, Any]) -> "Policy":
        """From a run.json; the defaults where there is none."""
        return cls.from_arguments(Arguments("run.json", record))

    def to_json(self) -> Dict[str, Any]:
        return asdict(self)
