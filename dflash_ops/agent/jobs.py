"""Running a verb of the trainer contract: what it is started with, and how it ended."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Optional

from . import cgroup
from .accounts import Account, find_account, hand_over, let_through, popen_options
from .arguments import Arguments
from .assets import Asset
from .conversation import Conversation
from .devices import Devices, inventory, resolve
from .environments import ManagedEnvironment
from .files import write_json
from .follow import POLL_S, Tail
from .output import JobOutput
from .prepared import prepares_on_gpu
from .processes import Mark, signal_group, until_ended
from .pythons import base_environment, find_python
from .releases import find_release
from .variables import Variables
from .workdir import WorkDir

CONTRACT = 1
_STACK_TIME_S = 1.0
NO_GPU = Devices((), None)


@dataclass(frozen=True)
class Job:
    """What `check`, `prepare`, `tune`, `canary`, `verdict` and `launch` are asked for, resolved on this host."""

    digest: str
    release: Path
    module: str
    python: str
    settings: Dict[str, Any]
    devices: Devices
    account: Optional[Account]
    playbook: Optional[str]
    variables: Variables
    assets: Dict[str, Asset]
    managed: Optional[ManagedEnvironment]
    """Whose Python that is, where dflash-ops made it."""

    @classmethod
    def from_arguments(cls, work: WorkDir, args: Arguments, *, prepares: bool = False) -> "Job":
        """`prepares`: it is the verb `prepare`, which gets no GPU where it would not use one."""
        settings = args.table("settings")
        Arguments(f"{args.op} settings", settings).table("workload")
        digest = args.digest()
        # before its Python is looked for: it can say better what is missing
        managed = ManagedEnvironment.of_python(work, args.text("python"))
        return cls(
            digest,
            find_release(work, digest),
            args.module(),
            find_python(args.text("python")),
            settings,
            NO_GPU if prepares and not prepares_on_gpu(settings) else resolve(settings["workload"], inventory()),
            find_account(args.optional_text("user")),
            args.optional_text("playbook"),
            Variables.from_arguments(args),
            Asset.all_from(args),
            managed,
        )

    @classmethod
    def from_record(
        cls, work: WorkDir, record: Dict[str, Any], settings: Dict[str, Any], secret_variables: Dict[str, str]
    ) -> "Job":
        """The job of a run.json once more, resolved on this host anew, with these settings."""
        variables = record["binding"].get("variables") or {}
        plain = {name: value for name, value in variables.items() if value is not None}
        values = {name: record.get(name) for name in ("module", "python", "user", "playbook", "assets")}
        values.update(digest=record.get("release"), settings=settings, environment=plain, secrets=secret_variables)
        return cls.from_arguments(work, Arguments("run.json", values), prepares=record.get("prepares") is not None)

    @property
    def workload(self) -> Dict[str, Any]:
        return dict(self.settings["workload"])

    def contract_settings(self, work: WorkDir, run: Optional[str]) -> Dict[str, Any]:
        """The settings file of the contract: what the client sent, and what only the host knows."""
        return {
            "prepared": None,
            "training": {},
            **self.settings,
            "contract": CONTRACT,
            "run": run,
            "cache": str(work.cache),
        }

    def command(self, verb: str, settings: Path, out: Path) -> List[str]:
        return [self.python, "-m", self.module, verb, "--settings", str(settings), "--out", str(out)]

    def environment(self, mark: Mark) -> Dict[str, str]:
        """Without the secrets: this may be kept and shown."""
        return {
            **base_environment(self.python, self.account),
            **self.variables.plain,
            "PYTHONPATH": str(self.release),
            # a prefix for bytecode would also hide that of torch: 6 s more for each import
            "PYTHONDONTWRITEBYTECODE": "1",
            "HF_HUB_OFFLINE": "1",
            "CUDA_VISIBLE_DEVICES": self.devices.cuda_visible,
            **mark.environment(),
        }

    def open_to_account(self, work: WorkDir, folder: Path, *owned: Path) -> None:
        """Lets the job's account reach the release, the caches and its `folder`, and gives it what is `owned`."""
        folders = [work.releases, work.cache / "prepared", work.envs, folder]
        let_through(self.account, work.root, folders + ([work.assets] if work.assets.is_dir() else []))
        hand_over(self.account, work.cache, work.cache / "prepared", *owned)


@dataclass(frozen=True)
class Ending:
    """How a verb ended: exit code or signal, whether our deadline ended it, and OOM kills meanwhile."""

    code: Optional[int]
    signal: Optional[int]
    deadline: bool
    oom_kills: int

    def describe(self) -> str:
        if self.deadline:
            return "did not end before its deadline"
        if self.signal is not None:
            oom = ", and the kernel reported an out-of-memory kill" if self.oom_kills else ""
            return f"was killed by {signal_name(self.signal)}{oom}"
        return f"ended with exit code {self.code}"


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def new_id() -> str:
    """A name that sorts by time and is not given twice."""
    return time.strftime("%Y%m%d-%H%M%S", time.gmtime()) + "-" + os.urandom(2).hex()


def new_scratch_id() -> str:
    """Of a folder in `scratch`: by our pid the next agent tells it from one whose agent was killed."""
    return f"{new_id()}-{os.getpid()}"


def run_verb(
    conversation: Conversation, job: Job, verb: str, *, name: str, folder: Path, out: Path, timeout_s: float
) -> Ending:
    """Runs `verb` to its end or to the deadline, its output in `folder`/log and on stream 0.

    The caller has marked `folder` as running. The job lives in its own session and is killed, with all that it started,
    when the client is gone. The output goes to the file first: a slow client never holds the job up.
    """
    work = conversation.work
    mark = Mark.of_job(work.root, name)
    settings = folder / "settings.json"
    write_json(settings, job.contract_settings(work, None))
    job.open_to_account(work, folder, settings, out)
    kills_before = cgroup.oom_kills() or 0
    output = JobOutput(folder / "log", job.variables.masks)
    with output.writer() as log, conversation.starting() as register:
        process = subprocess.Popen(
            job.command(verb, settings, out),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=job.release,
            env={**job.environment(mark), **job.variables.secrets},
            start_new_session=True,
            **popen_options(job.account),
        )
        registered = register(lambda: _kill(process.pid, mark))
    tail = Tail(lambda _: folder / "log")
    try:
        overdue = _wait(conversation, process, tail, timeout_s)
        # now: what the kernel kills while we clear away is not what ended the job
        kills = (cgroup.oom_kills() or 0) - kills_before
    finally:
        _kill(process.pid, mark)
        process.wait()
        output.finish()
        conversation.settle(registered)
    for block in tail.read():
        conversation.data(block)
    code = process.returncode
    return Ending(None if code < 0 else code, -code if code < 0 else None, overdue, kills)


def _wait(conversation: Conversation, process: "subprocess.Popen[bytes]", tail: Tail, timeout_s: float) -> bool:
    """Streams the output until the process has ended (False) or its time is over (True)."""
    until = time.monotonic() + timeout_s
    asked_for_stacks = False
    with until_ended(process.pid) as pause:
        while process.poll() is None:
            for block in tail.read():
                conversation.data(block)
            if time.monotonic() > until:
                if asked_for_stacks:
                    return True
                # the contract: SIGUSR1 prints the stack of every thread; a hang then shows where
                os.kill(process.pid, signal.SIGUSR1)
                asked_for_stacks, until = True, time.monotonic() + _STACK_TIME_S
            pause(POLL_S)
    return asked_for_stacks


def _kill(leader: int, mark: Mark) -> None:
    signal_group(leader, signal.SIGKILL)
    mark.kill()
