"""`build WORKDIR DIGEST LOCK_FD`: makes one managed environment, whole or not at all, and outlives every client.

Whoever starts it has written `order.json` and `requirements.txt`, and hands over the lock that is held on this build.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import signal
import stat
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any, Dict, List

from .builds import Build
from .disk import free_bytes
from .environments import MARKER, seal_of
from .errors import AgentError, ExitCode
from .files import fsync_folder, open_regular, read_json, remove_tree, tail_lines, write_json
from .jobs import signal_name
from .output import JobOutput
from .pip_words import explain
from .processes import signal_group
from .pythons import base_environment, probe
from .supervisor import detach
from .variables import Variables
from .workdir import WorkDir

_SCRIPT_LIMIT = 1024 * 1024
_RUN_PIP = """
import runpy, sys
sys.path.insert(0, sys.argv.pop(1))
runpy.run_module("pip", run_name="__main__", alter_sys=True)
"""


class Builder:
    def __init__(self, build: Build, variables: Variables) -> None:
        self._build = build
        self._order: Dict[str, Any] = read_json(build.part / "order.json") or {}
        self._variables = variables
        self._until = time.monotonic() + float(self._order["timeout_s"])

    def run(self) -> None:
        build = self._build
        try:
            self._make()
            build.work.record("environment_end", environment=build.digest)
        except Exception as error:  # a fault of ours ends the build with a reason, too
            told = self._told(error)
            # the room that is half used is given back; what was downloaded serves the next try
            for path in (build.tree, build.pip, build.part / "tmp"):
                remove_tree(path)
            write_json(build.failure, self._variables.masks.value(told.to_json()))
            build.work.record("environment_end", environment=build.digest, failed=told.kind)

    def _make(self) -> None:
        build, order = self._build, self._order
        tmp = build.part / "tmp"
        tmp.mkdir(mode=0o700)
        self._say(f"making an environment of {order['base']} (Python {order['version']})")
        self._step([order["python"], "-I", "-m", "venv", "--without-pip", str(build.tree)], order["python"])
        _unpack_pip(Path(order["pip"]), build.pip)
        python = str(build.tree / "bin" / "python")
        source = [] if order["wheels"] is None else ["--no-index", "--find-links", order["wheels"]]
        policy = ["--no-deps", "--require-hashes", "--only-binary", ":all:"]
        quiet = ["--no-input", "--disable-pip-version-check", "--progress-bar", "off"]
        listed = ["-r", str(build.part / "requirements.txt")]
        self._say(f"installing {', '.join(order['pins'])} from {order['wheels'] or 'the index'}")
        self._step([*self._pip(python), "install", *quiet, *policy, *source, *listed], python)
        complaints = self._complaints(python)
        installed = probe(python)
        remove_tree(tmp)
        _give_name(build.tree, build.folder)
        _make_read_only(build.tree)
        marker = {
            "v": 1,
            **{key: order[key] for key in ("digest", "lock", "base", "platform", "wheels")},
            "version": installed.version,
            "packages": installed.packages,
            "complaints": complaints,
            "seal": seal_of(build.tree),
            "built": time.time(),
        }
        _sync(build.tree)
        # the last file: what has it is whole
        write_json(build.tree / MARKER, marker, mode=0o444)
        build.tree.chmod(0o755)
        build.tree.rename(build.folder)
        # only now: a folder must be writable to be moved
        build.folder.chmod(0o555)
        fsync_folder(build.work.envs)
        remove_tree(build.part)
        self._say("done")

    def _environment(self, python: str) -> Dict[str, str]:
        """Never the node's own. A build from wheels asks nobody: not even the host's pip configuration."""
        part = self._build.part
        own = {"TMPDIR": str(part / "tmp"), "PIP_CACHE_DIR": str(part / "cache"), **self._build.mark.environment()}
        if self._order["wheels"] is not None:
            return {**base_environment(python, None), **own, "PIP_CONFIG_FILE": os.devnull}
        return {**base_environment(python, None), **self._variables.plain, **self._variables.secrets, **own}

    def _pip(self, python: str) -> List[str]:
        return [python, "-I", "-c", _RUN_PIP, str(self._build.pip)]

    def _step(self, command: List[str], python: str) -> None:
        """AgentError with pip's reason. All that it started is ended with it."""
        code = self._run(command, python)
        if code < 0:
            raise self._build.failed(f"could not be made: {signal_name(-code)} ended pip", "see what killed it there")
        if code > 0:
            raise explain(tail_lines(self._build.log, 200), self._order)

    def _run(self, command: List[str], python: str) -> int:
        output = JobOutput(self._build.log, self._variables.masks)
        with output.writer() as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                env=self._environment(python),
                start_new_session=True,
            )
        try:
            return process.wait(max(0.0, self._until - time.monotonic()))
        except subprocess.TimeoutExpired:
            limit = f"within {self._order['timeout_s']:g} s"
            raise self._build.failed(
                f"was not finished {limit}", "see its log; or set environment.timeout_s in the playbook"
            ) from None
        finally:
            signal_group(process.pid, signal.SIGKILL)
            self._build.mark.kill()
            process.wait()
            output.finish()

    def _complaints(self, python: str) -> List[str]:
        """What `pip check` misses. Told, and no error: a lock may know better than the packages."""
        done = subprocess.run(
            [*self._pip(python), "check", "--disable-pip-version-check"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            cwd="/",
            env=self._environment(python),
            timeout=max(1.0, self._until - time.monotonic()),
            check=False,
        )
        found = done.stdout.splitlines() if done.returncode != 0 else []
        for line in found:
            self._say(f"pip check: {line}")
        return found

    def _say(self, text: str) -> None:
        with open(self._build.log, "a", encoding="utf-8") as log:
            log.write(f"{text}\n")

    def _told(self, error: Exception) -> AgentError:
        if isinstance(error, AgentError):
            return error
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = free_bytes(self._build.work.root)
            what = f"no space left while the environment was made: {free} bytes free"
            fix = "make room there (dflash-ops prune), or choose another work directory"
            return AgentError("disk_full", what, str(self._build.work.envs), fix, ExitCode.BLOCKED)
        what = f"could not be made: {type(error).__name__}: {error}"
        return self._build.failed(what, "read its log above", tail_lines(self._build.log))


def _unpack_pip(wheel: Path, folder: Path) -> None:
    """As files: out of a zip pip does not find its certificates. Without its metadata it counts as installed nowhere.

    Where a distribution took its libraries out of it, they lie beside it as wheels of their own.
    """
    for path in [wheel, *sorted(wheel.parent.glob("*.whl"))]:
        if path != wheel and path.name.startswith(("pip-", "setuptools-", "wheel-", "pkg_resources-")):
            continue
        with zipfile.ZipFile(path) as archive:
            archive.extractall(folder, [name for name in archive.namelist() if ".dist-info/" not in name])


def _give_name(tree: Path, name: Path) -> None:
    """Scripts have the path of their interpreter in them: that under which it will be found."""
    before, after = os.fsencode(tree), os.fsencode(name)
    for path in [tree / "pyvenv.cfg", *sorted((tree / "bin").iterdir())]:
        if path.is_symlink() or path.stat().st_size > _SCRIPT_LIMIT:
            continue
        with open_regular(path) as file:
            data = file.read()
        if before in data:
            path.write_bytes(data.replace(before, after))


def _make_read_only(tree: Path) -> None:
    """For everybody to read: the job may run as another account. Its root stays writable for the marker."""
    for folder, below, names in os.walk(tree, topdown=False):
        for name in names:
            path = os.path.join(folder, name)
            mode = os.lstat(path).st_mode
            if stat.S_ISREG(mode):
                os.chmod(path, 0o555 if mode & stat.S_IXUSR else 0o444)
        for name in below:
            path = os.path.join(folder, name)
            if not os.path.islink(path):
                os.chmod(path, 0o555)  # noqa: S103


def _sync(folder: Path) -> None:
    """Everything of the file system that `folder` lies on is on the disk: one call for tens of thousands of files."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.syncfs(fd) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(folder))
    finally:
        os.close(fd)


def build(workdir: str, digest: str, lock_fd: int) -> int:
    """`lock_fd` stays open to the end, and no child gets it: while it is open, this build goes on."""
    os.set_inheritable(lock_fd, False)
    told = json.loads(sys.stdin.buffer.read())
    one = Build(WorkDir(Path(workdir)), digest)
    detach()
    nothing = os.open(os.devnull, os.O_RDWR)
    log = os.open(one.log, os.O_WRONLY | os.O_APPEND)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    Builder(one, Variables(told["plain"], told["secrets"])).run()
    return 0
