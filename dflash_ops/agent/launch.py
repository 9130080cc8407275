"""Launching a run: the gate, the run's folder, and a supervisor that outlives this conversation."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Dict, List, Optional

from .arguments import Arguments
from .assets import refuse_changed
from .conversation import Conversation
from .devices import search_path
from .errors import AgentError, ExitCode
from .exits import write_exit
from .facts import can_start_units
from .files import exclusive, read_json, tail_lines, write_json
from .gate import NO_LIMIT, Admission, allow_launch
from .gpu_memory import in_use
from .jobs import Job
from .leases import refuse_if_busy
from .notify import Notify
from .occupied import refuse_if_occupied
from .policy import Policy
from .prepared import key_from, open_place, place_of, refuse_if_being_made
from .processes import Mark, ProcessId, boot_id
from .resume import refuse_if_alive, refuse_if_stopped
from .runs import RunFolder, RunState, find_run, next_sequence
from .successor import Kind, Outcome, Successor
from .workdir import WorkDir

_START_TIME_S = 30.0
_LOOK_S = 0.005
_STOP_SLACK_S = 60


def op_free(conversation: Conversation, args: Arguments) -> Dict[str, Any]:
    """Whether a launch would find its devices free; AgentError `busy` names who has one."""
    devices = Job.from_arguments(conversation.work, args).devices.names
    refuse_if_busy(conversation.work, devices)
    refuse_if_occupied(conversation.work, devices, args.optional_text("shared_gpus"))
    return {"devices": devices}


@dataclass(frozen=True)
class Order:
    """A run that is asked for. `max_age_s`: seconds that a verdict may be old; `reason`: why there is no canary;
    `parent`: the run that it continues; `restart`: how many times in a row the host started it by itself;
    `notify`: who is told what becomes of it; `prepares`: the folder of the data that it makes, None where it trains."""

    run: str
    job: Job
    policy: Policy
    max_age_s: float
    reason: Optional[str]
    parent: Optional[str] = None
    restart: int = 0
    notify: Optional[Notify] = None
    prepares: Optional[Path] = None

    @property
    def verb(self) -> str:
        return "run" if self.prepares is None else "prepare"


def op_launch(conversation: Conversation, args: Arguments) -> Dict[str, Any]:
    work = conversation.work
    conversation.lock.refuse_if_taken()
    key = None if args.values.get("key") is None else key_from(args)
    job = Job.from_arguments(work, args, prepares=key is not None)
    run, reason = args.new_run(), args.optional_text("reason")
    if reason is not None and not reason.strip():
        raise AgentError(
            "request", "the reason is blank", "request launch", "say why there is no canary", ExitCode.USAGE
        )
    parent = args.optional_run("parent")
    order = Order(
        run=run,
        job=job,
        policy=Policy.from_arguments(args),
        max_age_s=args.seconds("max_age_s", NO_LIMIT),
        reason=reason,
        parent=parent,
        notify=Notify.from_arguments(args),
        prepares=None if key is None else place_of(work, key),
    )
    folder = launch(work, order, conversation.agent_file)
    record = folder.record()
    return {"run": run, "unit": record["unit"], "prepares": record["prepares"], "pid": wait_for_job(folder)}


def launch(work: WorkDir, order: Order, agent_file: str) -> RunFolder:
    """Past the gate to a run under its own supervisor; needs no client.

    AgentError `gate`, `busy`, `run_exists` or `start`.
    """
    devices = order.job.devices.names
    but = order.parent if order.restart else None
    refuse_if_busy(work, devices, but=but)
    refuse_if_occupied(work, devices, order.policy.shared_gpus)
    refuse_changed(work, order.job.assets)
    admission = allow_launch(work, order.job, order.max_age_s, order.reason, trains=order.prepares is None)
    gpu_memory = in_use(devices)
    with exclusive(work.guard):
        refuse_if_busy(work, devices, but=but)
        parent = None if order.parent is None else find_run(work, order.parent)
        if parent is not None:
            (refuse_if_stopped if order.restart else refuse_if_alive)(parent)
        if order.prepares is not None:
            refuse_if_being_made(work, order.prepares, but=but)
        folder = _begin(work, order, admission, gpu_memory)
        if parent is not None:
            kind = Kind.RESTART if order.restart else Kind.RESUME
            left = max(0, order.policy.restarts - order.restart)
            Successor(kind, Outcome.STARTED, order.run, left=left).write(parent.path)
    about = {"run": order.run, "release": order.job.digest, "devices": devices, "playbook": order.job.playbook}
    about["verb"] = order.verb
    told = {"parent": order.parent, "skipped_canary": order.reason, "shared_gpus": order.policy.shared_gpus}
    work.record("launch", **about, **told)
    # detached from within the parent's unit, it would end with that unit
    only_as_unit = bool(order.restart and parent is not None and parent.record().get("unit"))
    _start_supervisor(work, folder, order.policy, agent_file, only_as_unit=only_as_unit)
    return folder


def _begin(work: WorkDir, order: Order, admission: Admission, gpu_memory: Optional[Dict[str, int]]) -> RunFolder:
    """Makes runs/<run>/ with all that the supervisor and every later reader need; run.json comes last."""
    job, run, verdict = order.job, order.run, admission.verdict
    folder = RunFolder(work.runs / run)
    try:
        folder.path.mkdir(mode=0o700)
    except FileExistsError:
        raise AgentError(
            "run_exists", f"there is a run {run!r} already", str(work.runs), "choose another name", ExitCode.RUN_FAILED
        ) from None
    folder.log.path.mkdir(mode=0o700)
    folder.out.mkdir(mode=0o700)
    settings = folder.path / "settings.json"
    # the contract: `run` is null outside the verb of that name
    write_json(settings, job.contract_settings(work, run if order.prepares is None else None))
    owned = [settings, folder.out]
    if order.prepares is not None:
        open_place(order.prepares, job.account)
        owned.append(order.prepares)
    job.open_to_account(work, folder.path, *owned)
    if verdict is not None:
        write_json(folder.path / "verdict.json", verdict.to_json())
    # until the supervisor has written its own, the run lives as long as the process that starts it
    starter = ProcessId.of(os.getpid())
    state = {"v": 1, "boot_id": boot_id(), "supervisor": starter.to_json() if starter else None, "job": None}
    # it says nothing once this boot is over
    write_json(folder.state_file, state, durable=False)
    account = job.account
    record = {
        "v": 1,
        "run": run,
        "release": job.digest,
        "module": job.module,
        "python": job.python,
        "python_version": admission.installed.version,
        "managed": None if job.managed is None else job.managed.digest,
        "packages": admission.installed.packages,
        "command": job.command(order.verb, settings, order.prepares or folder.out),
        "prepares": None if order.prepares is None else str(order.prepares),
        "cwd": str(job.release),
        "environment": job.environment(Mark.of_run(work.root, run)),
        "secrets": job.variables.names_of_secrets,
        "assets": {name: asdict(asset) for name, asset in job.assets.items()},
        "user": None if account is None else account.name,
        "devices": job.devices.names,
        "gpu_memory_bytes": gpu_memory,
        "binding": asdict(admission.binding),
        "verdict": None if verdict is None else verdict.digest,
        "max_age_s": order.max_age_s,
        "skipped_canary": order.reason,
        "playbook": job.playbook,
        "parent": order.parent,
        "restart": order.restart,
        "policy": order.policy.to_json(),
        "unit": f"dflash-ops-{run}" if can_start_units() else None,
        "sequence": next_sequence(work),
        "started": time.time(),
    }
    if job.variables.secrets:
        write_json(folder.secrets_file, job.variables.secrets)
    if order.notify is not None:
        order.notify.keep(folder.path)
    write_json(folder.path / "run.json", record)
    return folder


def _start_supervisor(work: WorkDir, folder: RunFolder, policy: Policy, agent_file: str, *, only_as_unit: bool) -> None:
    """Starts it as a systemd unit, or detached where that cannot be; then run.json's `unit` becomes null."""
    command = [sys.executable, "-I", "-S", agent_file, "supervise", str(folder.path)]
    record = folder.record()
    unit: Optional[str] = record["unit"]
    if unit is not None:
        properties = {
            "Type": "exec",
            # SIGTERM reaches the supervisor alone; it asks the trainer's main process for a checkpoint
            "KillMode": "mixed",
            "TimeoutStopSec": str(int(policy.grace_s) + _STOP_SLACK_S),
            # an out-of-memory kill of the job must not take the supervisor, which reports it
            "OOMPolicy": "continue",
        }
        options = [f"--property={name}={value}" for name, value in properties.items()]
        problem = _run_quietly(["systemd-run", "--quiet", f"--unit={unit}", *options, "--", *command])
        if problem is None:
            return
        if only_as_unit:
            raise _could_not_start(folder, problem)
        # systemd is there but cannot be asked (no bus in small containers): detached works there too
        work.record("no_unit", run=folder.run, reason=problem)
        write_json(folder.path / "run.json", {**record, "unit": None})
    problem = _run_quietly([*command, "--detach"])
    if problem is not None:
        raise _could_not_start(folder, problem)


def _run_quietly(command: List[str]) -> Optional[str]:
    """Runs a command that returns at once; None, or why it failed."""
    environment = {"PATH": search_path(), "LANG": "C.UTF-8"}
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            env=environment,
            cwd="/",
            timeout=_START_TIME_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return None if done.returncode == 0 else (done.stderr.strip() or f"exit code {done.returncode}")


def wait_for_job(folder: RunFolder) -> int:
    """The pid of the run's main process once it is started; AgentError `start` with the reason otherwise."""
    until = time.monotonic() + _START_TIME_S
    while time.monotonic() < until:
        ended = read_json(folder.exit_file)
        if ended is not None and ended.get("error"):
            raise _could_not_start(folder, ended["error"])
        job = ProcessId.from_json((read_json(folder.state_file) or {}).get("job"))
        if job is not None:
            return job.pid
        time.sleep(_LOOK_S)
    raise _could_not_start(folder, f"its supervisor did not start it within {_START_TIME_S:g} s")


def _could_not_start(folder: RunFolder, why: str) -> AgentError:
    """Ends what has begun, so that nothing of it comes up later, and says why."""
    supervisor = folder.supervisor()
    if supervisor is not None and supervisor.pid != os.getpid():
        supervisor.send(9)
    folder.mark.kill()
    folder.secrets_file.unlink(missing_ok=True)
    if not folder.exit_file.exists():
        write_exit(folder, RunState.FAILED, error=why)
    evidence = tail_lines(folder.path / "supervisor.log")
    return AgentError(
        "start",
        f"run {folder.run} could not start: {why}",
        "supervisor of the host",
        "look at the evidence, then deploy again",
        ExitCode.RUN_FAILED,
        evidence,
    )
