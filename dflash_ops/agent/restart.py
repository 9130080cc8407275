"""A run that crashed starts again by itself: a child of it, from its last whole checkpoint, if the gate allows it.

Its supervisor does this at its end, without any client. Budget and backoff are the policy's.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import replace
from typing import Any, Callable, Dict, Optional

from .checkpoints import last_whole
from .errors import AgentError, ExitCode
from .files import read_json
from .jobs import Job
from .launch import Order, launch, wait_for_job
from .notify import Notify
from .policy import Policy
from .processes import boottime_s
from .refusals import REFUSED
from .runs import RunFolder, RunState
from .successor import Kind, Outcome, Successor
from .workdir import WorkDir

_CRASHES = (RunState.FAILED, RunState.OOM)
_LONGEST_BACKOFF_S = 3600.0


class Restart:
    """The restart of one run that has ended. `plan` is to be called before exit.json is there, `carry_out` after."""

    def __init__(self, folder: RunFolder, secret_variables: Dict[str, str], agent_file: str) -> None:
        self._folder = folder
        self._work = WorkDir(folder.root)
        self._record = folder.record()
        self._done = int(self._record.get("restart", 0))
        self._secrets = secret_variables
        self._agent_file = agent_file
        self._next: Optional[Successor] = None
        self._due = 0.0

    def plan(self, state: RunState, code: Optional[int], trouble: Optional[str]) -> None:
        """Writes next.json where restarts were asked for. `trouble`: what is wrong beside its exit code."""
        policy = Policy.of_record(self._record)
        if state not in _CRASHES or policy.restarts == 0:
            return
        left = policy.restarts - self._done
        if code == REFUSED:
            self._next = _refusal("the trainer refused its settings or its input, and would again", left)
        elif trouble is not None:
            # the same step on the same data would hang, or give no loss, again: what is needed is a look, not a loop
            self._next = _refusal(f"a person must look first: {trouble}", left)
        elif left <= 0:
            self._next = _refusal(f"all {policy.restarts} restarts are used up", left)
        else:
            delay_s = min(policy.restart_backoff_s * 2**self._done, _LONGEST_BACKOFF_S)
            self._due = boottime_s() + delay_s
            self._next = Successor(Kind.RESTART, Outcome.WAITING, due=time.time() + delay_s, left=left - 1)
        self._next.write(self._folder.path)

    def carry_out(self, stopped: Callable[[], bool]) -> None:
        """Waits for the time to come and starts the child. `stopped` waits a moment and tells whether to give up."""
        planned = self._next
        if planned is None or planned.outcome is not Outcome.WAITING:
            return None
        while True:
            if stopped() or self._folder.stop_file.exists():
                return self._end(planned, Outcome.STOPPED, "it was stopped before it was started again")
            if boottime_s() >= self._due:
                break
        try:
            self._start()
        except AgentError as error:
            if error.kind == "start":
                # there is a child, and its exit.json says why it could not
                return None
            outcome = Outcome.STOPPED if error.kind == "stopped" else Outcome.REFUSED
            self._end(planned, outcome, error.what)
        except OSError as error:
            self._end(planned, Outcome.REFUSED, f"the host refused: {error}")
        return None

    def _start(self) -> None:
        settings = self._settings()
        record = self._record
        order = Order(
            run=self._new_name(),
            job=Job.from_record(self._work, record, settings, self._secrets),
            policy=Policy.of_record(record),
            max_age_s=float(record["max_age_s"]),
            reason=record.get("skipped_canary"),
            parent=self._folder.run,
            restart=self._done + 1,
            notify=Notify.of_run(self._folder.path),
            prepares=self._folder.prepares(),
        )
        # until its own supervisor has taken over, the child lives by this process
        wait_for_job(launch(self._work, order, self._agent_file))

    def _settings(self) -> Dict[str, Any]:
        """The run's own, from its last whole checkpoint; from the beginning where there was none yet.

        What prepares data finds what it did in their folder.
        """
        settings = read_json(self._folder.path / "settings.json")
        if settings is None:
            raise _unfit("its settings.json cannot be read")
        if self._folder.prepares() is not None:
            return settings
        found, damaged = last_whole(self._work, self._folder)
        for one in damaged:
            self._work.record("damaged", run=self._folder.run, path=str(one.path), why=one.why)
        training = dict(settings.get("training", {}))
        if found is not None:
            steps = training.get("steps")
            if isinstance(steps, int) and found.step >= steps:
                raise _unfit(f"its checkpoint is at step {found.step} of {steps}: nothing is left to do")
            training["resume_from"] = str(found.path)
            # it has its weights from there
            training.pop("init_from", None)
        elif damaged or training.get("resume_from") is not None:
            raise _unfit("none of its checkpoints is whole")
        return {**settings, "training": training}

    def _new_name(self) -> str:
        playbook = self._record.get("playbook") or "restart"
        if self._folder.prepares() is not None:
            playbook += "-prepare"
        return f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{playbook}-{os.urandom(2).hex()}"

    def _end(self, planned: Successor, outcome: Outcome, why: str) -> None:
        with contextlib.suppress(OSError):
            self._work.record("restart_" + outcome.value, run=self._folder.run, why=why)
        replace(planned, outcome=outcome, why=why, due=None).write(self._folder.path)


def _refusal(why: str, left: int) -> Successor:
    return Successor(Kind.RESTART, Outcome.REFUSED, why=why, left=left)


def _unfit(why: str) -> AgentError:
    return AgentError("restart", why, "supervisor of the host", "see its log", ExitCode.RUN_FAILED)
