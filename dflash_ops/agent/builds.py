"""Making a managed environment: who begins it, who waits for it. The work itself is a process of its own (builder.py).

It outlives the conversation that began it: what a broken link leaves goes on, and the next one waits for its end.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import subprocess
import sys
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional

from .accounts import find_account, let_through
from .arguments import Arguments
from .conversation import Conversation
from .devices import search_path
from .disk import free_bytes
from .environments import Base, ManagedEnvironment, users_of
from .errors import AgentError, ExitCode
from .files import fsync_folder, read_json, remove_tree, write_json
from .follow import POLL_S, Tail
from .lockfile import BadLock, Lock, normal_name, parse_lock
from .processes import Mark
from .pythons import candidates, find_python
from .variables import Variables
from .workdir import WorkDir

_HOUR_S = 3600.0
_SPAWN_S = 30.0
_TRIES = 50
_TRY_AGAIN_S = 0.02
_ROOM = 256 * 1024 * 1024
"""Free bytes below which none is begun: as the doctor asks for a run."""


@dataclass(frozen=True)
class Wanted:
    """What is asked for. `python`: whose environment it becomes; `wheels`: a folder that is taken instead of an index;
    `timeout_s`: seconds that its making may take."""

    lock: Lock
    python: str
    base: Base
    wheels: Optional[str]
    timeout_s: float

    @classmethod
    def from_arguments(cls, args: Arguments) -> "Wanted":
        """AgentError `request`, `python_missing`, or `python_version` where it is not the one that the lock is for."""
        try:
            lock = parse_lock(args.text("lock"))
        except BadLock as error:
            raise AgentError(
                "request",
                f"line {error.line} of the lock: {error.what}",
                "request environment",
                error.hint,
                ExitCode.USAGE,
            ) from None
        python = find_python(args.text("python"))
        base = Base.ask(python)
        _refuse_other_version(base, args.optional_text("version"))
        wheels = args.optional_text("wheels")
        folder = None if wheels is None else os.path.abspath(os.path.expanduser(wheels))
        return cls(lock, python, base, folder, args.seconds("timeout_s", _HOUR_S))

    @property
    def digest(self) -> str:
        return self.base.name_of(self.lock)

    def refuse_hopeless(self, work: WorkDir) -> None:
        """AgentError `environment` or `disk_full` for what is known to fail before it is begun."""
        if self.base.missing:
            raise AgentError(
                "environment",
                f"{self.base.path} cannot make environments: it has no {' and no '.join(self.base.missing)}",
                "python of the host",
                f"there: apt install python{self.base.minor}-venv; or name another in `python`",
                ExitCode.BLOCKED,
            )
        if self.wheels is not None and not os.path.isdir(self.wheels):
            raise AgentError(
                "environment",
                f"there is no wheel folder {self.wheels}",
                "wheels of the environment",
                "put it there, or correct `wheels` in the playbook",
                ExitCode.BLOCKED,
            )
        free, need = free_bytes(work.root), self._needed_bytes()
        if free < need:
            raise AgentError(
                "disk_full",
                f"no space for the environment: {free} bytes free, {need} needed",
                str(work.envs),
                "make room there (dflash-ops prune), or choose another work directory",
                ExitCode.BLOCKED,
            )

    def _needed_bytes(self) -> int:
        """What the wheels of the folder unpack to, once more a fifth for bytecode; of an index nobody knows it."""
        pins = {(pin.name, pin.version) for pin in self.lock.pins}
        largest: Dict[Any, int] = {}
        for path in Path(self.wheels).glob("*.whl") if self.wheels else ():
            name, _, rest = path.name.partition("-")
            pin = (normal_name(name), rest.partition("-")[0])
            if pin in pins:
                largest[pin] = max(largest.get(pin, 0), _unpacked(path))
        return _ROOM + sum(largest.values()) * 6 // 5


def _unpacked(wheel: Path) -> int:
    try:
        with zipfile.ZipFile(wheel) as archive:
            return sum(item.file_size for item in archive.infolist())
    except (OSError, zipfile.BadZipFile):
        # pip says it better
        return 0


def _refuse_other_version(base: Base, version: Optional[str]) -> None:
    if version is None or version == base.version or base.version.startswith(f"{version}."):
        return
    there = [path for path in candidates() if os.path.basename(path) == f"python{version}"]
    raise AgentError(
        "python_version",
        f"the environment is made for Python {version}, {base.path} is {base.version}",
        "python of the host",
        f"set `python` of this host to {there[0]}" if there else f"install Python {version} there, then set `python`",
        ExitCode.BLOCKED,
        there or None,
    )


@dataclass(frozen=True)
class Build:
    """One environment on its way, and its files. Who holds the kernel's lock on `lock_file` works on `part`."""

    work: WorkDir
    digest: str

    @property
    def folder(self) -> Path:
        """Where it lies once it is whole."""
        return self.work.envs / self.digest

    @property
    def part(self) -> Path:
        return self.work.envs / f"{self.digest}.part"

    @property
    def tree(self) -> Path:
        """The virtual environment until it gets its name."""
        return self.part / "venv"

    @property
    def pip(self) -> Path:
        """The pip that fills it. It is no part of it: an environment holds what its lock names, nothing else."""
        return self.part / "pip"

    @property
    def log(self) -> Path:
        """It stays when the environment is whole: how it came to be."""
        return self.work.envs / f"{self.digest}.log"

    @property
    def lock_file(self) -> Path:
        return self.work.envs / f"{self.digest}.lock"

    @property
    def failure(self) -> Path:
        return self.part / "failed.json"

    @property
    def mark(self) -> Mark:
        return Mark.of_job(self.work.root, f"environment-{self.digest}")

    @property
    def goes_on(self) -> bool:
        """Whether somebody works on it now."""
        try:
            fd = os.open(self.lock_file, os.O_RDWR)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(fd)
        return False

    def begin(self, wanted: Wanted, variables: Variables, agent_file: str) -> bool:
        """Starts the builder; False where one is at work already, or its work was done meanwhile."""
        with self._owned() as fd:
            if fd is None or ManagedEnvironment.find(self.work, self.digest) is not None:
                return False
            # what a killed builder started would go on writing
            self.mark.kill()
            for path in (self.tree, self.pip, self.part / "tmp", self.failure):
                remove_tree(path)
            self.part.mkdir(mode=0o700, exist_ok=True)
            self.log.unlink(missing_ok=True)
            self.log.touch(mode=0o600)
            text = wanted.lock.requirements(sources=wanted.wheels is None)
            (self.part / "requirements.txt").write_text(text)
            order = {
                "v": 1,
                "digest": self.digest,
                "lock": wanted.lock.digest,
                "pins": [f"{pin.name}=={pin.version}" for pin in wanted.lock.pins],
                "python": wanted.python,
                "base": wanted.base.path,
                "version": wanted.base.version,
                "platform": wanted.base.platform,
                "pip": wanted.base.pip[0],
                "wheels": wanted.wheels,
                "timeout_s": wanted.timeout_s,
            }
            write_json(self.part / "order.json", order)
            self.work.record("environment_begin", environment=self.digest, wheels=wanted.wheels)
            self._spawn(fd, variables, agent_file)
        return True

    @contextlib.contextmanager
    def _owned(self) -> Iterator[Optional[int]]:
        """The file descriptor by which the lock is held; None where another holds it for longer than a look takes."""
        fd = os.open(self.lock_file, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            for _ in range(_TRIES):
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    time.sleep(_TRY_AGAIN_S)
                    continue
                yield fd
                return
            yield None
        finally:
            # the builder has its own copy: the lock ends with the last one
            os.close(fd)

    def _spawn(self, fd: int, variables: Variables, agent_file: str) -> None:
        """In no session of ours. What pip must know goes through stdin: it may be secret."""
        process = subprocess.Popen(
            [sys.executable, "-I", agent_file, "build", str(self.work.root), self.digest, str(fd)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            cwd="/",
            env={"PATH": search_path(), "LANG": "C.UTF-8"},
            pass_fds=[fd],
            start_new_session=True,
        )
        told = json.dumps({"plain": variables.plain, "secrets": variables.secrets}).encode()
        try:
            _, said = process.communicate(told, timeout=_SPAWN_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            said = b"it did not start in time"
        if process.returncode != 0:
            why = said.decode("utf-8", "replace").strip().splitlines()[-1:] or [f"exit code {process.returncode}"]
            raise self.failed(f"could not be begun: {why[0]}", "run the same command again")

    def follow(self, conversation: Conversation) -> ManagedEnvironment:
        """Shows the log until the end. AgentError: what the builder said, or that it said nothing."""
        tail = Tail(lambda _: self.log)
        while True:
            # asked before the log is read: what was written before the end is then read too
            goes_on = self.goes_on
            for block in tail.read():
                conversation.data(block)
            if not goes_on:
                return self._result()
            time.sleep(POLL_S)

    def _result(self) -> ManagedEnvironment:
        found = ManagedEnvironment.find(self.work, self.digest)
        if found is not None:
            return found
        said = read_json(self.failure)
        if said is None:
            raise self.failed("was not finished: its builder was killed", "run the same command again: it begins anew")
        raise AgentError(
            str(said.get("kind")),
            str(said.get("what")),
            str(said.get("where")),
            str(said.get("fix")),
            ExitCode(int(said.get("exit", ExitCode.BLOCKED))),
            said.get("evidence"),
        )

    def forget(self) -> None:
        """What is left beside one that was removed: its log and its lock. Only the holder of the host's lock may."""
        if not self.folder.exists() and not self.part.exists() and not self.goes_on:
            self.log.unlink(missing_ok=True)
            self.lock_file.unlink(missing_ok=True)

    def failed(self, what: str, fix: str, evidence: Optional[List[str]] = None) -> AgentError:
        where = f"environment {self.digest[:12]}"
        return AgentError("environment", f"the environment {what}", where, fix, ExitCode.BLOCKED, evidence)


def op_environment(conversation: Conversation, args: Arguments) -> Dict[str, Any]:
    """The environment of a lock: the one that is there, or a new one. `dry_run`: only whether it is there or could be.

    AgentError `environment`, `disk_full`, `python_version`, `locked`.
    """
    work, dry_run = conversation.work, args.flag("dry_run")
    if not dry_run:
        conversation.lock.refuse_if_taken()
    wanted = Wanted.from_arguments(args)
    account = find_account(args.optional_text("user"))
    build = Build(work, wanted.digest)
    found = ManagedEnvironment.find(work, wanted.digest)
    damage = found.damage() if found is not None else "it is not whole" if build.folder.exists() else None
    reused = found is not None and damage is None
    if not reused and not build.goes_on:
        wanted.refuse_hopeless(work)
    if dry_run:
        return _told(wanted, found if reused else None, reused=reused, building=build.goes_on)
    if damage is not None:
        _set_aside(work, build.folder, damage)
        found = None
    if found is None:
        begun = build.begin(wanted, Variables.from_arguments(args).of_pip, conversation.agent_file)
        conversation.event("building", environment=wanted.digest, packages=len(wanted.lock.pins), begun=begun)
        found = build.follow(conversation)
    # prune goes by when one was last asked for; its files stay as they are
    os.utime(found.folder)
    let_through(account, work.root, [work.envs])
    return _told(wanted, found, reused=reused, building=False)


def _told(wanted: Wanted, found: Optional[ManagedEnvironment], *, reused: bool, building: bool) -> Dict[str, Any]:
    return {
        "digest": wanted.digest,
        "python": None if found is None else found.python,
        "reused": reused,
        "building": building,
        "base": wanted.base.path,
        "version": wanted.base.version,
        "packages": {pin.name: pin.version for pin in wanted.lock.pins},
        "complaints": [] if found is None else found.complaints,
    }


def _set_aside(work: WorkDir, folder: Path, damage: str) -> None:
    """AgentError `environment` where runs use it: they keep what they have."""
    users = users_of(work, folder.name)
    if users:
        raise AgentError(
            "environment",
            f"environment {folder.name[:12]}… is damaged ({damage}), and run {users[0]} goes on in it",
            str(folder),
            f"wait for the run or stop it (dflash-ops stop {users[0]}): then it is built anew",
            ExitCode.BLOCKED,
        )
    aside = folder.with_name(f"{folder.name}.damaged")
    remove_tree(aside)
    folder.chmod(0o700)
    folder.rename(aside)
    fsync_folder(work.envs)
    work.record("environment_damaged", environment=folder.name, why=damage)
    remove_tree(aside)
