"""The rig's pct says, returns and does what a real one (pve-container 6.1.10) did: `pct_transcript.txt`.

The transcript is replayed once, in its order, by bash on the node; then every case is compared: standard output,
standard error, exit status. Normalised, and nothing else: what depends on the day and the machine (dates, node name,
PIDs, figures of use, limits, cgroup and the line numbers of lxc-attach), the rig's container name in lxc-attach's own
messages (`dflash-rig-PID-200` there, `200` here), and digests of random data.
"""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.rig.rig import Rig

pytestmark = pytest.mark.rig

# Several pushes at once: who comes first, and how many had to wait for the lock, is chance.
CONCURRENT = "$ for i in 1 2 3 4 5 6 7 8; do"
OVERWRITES_PASSWD = "$ pct exec 200 -- ln -sfn /etc/passwd /root/lnk"
WITHOUT_VOLUME = "volume 'local:200/vm-200-disk-0.raw' does not exist"
NEEDS_PIP3 = "$ pct exec 200 -- which pip3"


@dataclass(frozen=True)
class Case:
    command: str
    stdout: list[str]
    stderr: list[str]
    status: int

    @property
    def title(self) -> str:
        return f"$ {self.command}"


def _read_transcript() -> list[Case]:
    text = Path(__file__).with_name("pct_transcript.txt").read_text()
    cases = []
    for block in re.split(r"(?m)^\$ ", text)[1:]:
        lines = block.splitlines()
        end = next(number for number, line in enumerate(lines) if line.startswith("[rc]"))
        cases.append(
            Case(
                command=lines[0],
                stdout=[line[6:] for line in lines[1:end] if line.startswith("[out]")],
                stderr=[line[6:] for line in lines[1:end] if line.startswith("[err]")],
                status=int(lines[end].split()[1]),
            )
        )
    return cases


CASES = _read_transcript()


def _normalised(lines: list[str], passwd_bytes: int) -> list[str]:
    text = "\n".join(lines)
    for pattern, replacement in (
        (r"\b[A-Z][a-z]{2} [ \d]\d \d\d:\d\d\b", "<date>"),
        (r"'nodes/[^/']+/lxc/", "'nodes/<node>/lxc/"),
        (r"lxc-attach: (dflash-rig-\d+-)?200: (\S+: \w+): \d+ ", r"lxc-attach: 200: \2: <line> "),
        (r"(?m)^(disk|maxdisk|diskread|diskwrite|mem|pid|swap|uptime): \d+$", r"\1: <number>"),
        (r"(?m)^\d+ sleep", "<pid> sleep"),
        (r"\b[0-9a-f]{64}\b", "<sha256>"),
        (rf"(?m)^({passwd_bytes}|1327) /etc/passwd$", "<size on the node> /etc/passwd"),
        (r"(?m)^\d+$\n^0::/.*$", "<open files>\n0::<cgroup>"),
    ):
        text = re.sub(pattern, replacement, text)
    return text.splitlines() if text else []


@pytest.fixture(scope="module")
def folder(rig: Rig) -> Path:
    """What the cases find in their working directory, which the container does not have, and the user bob in it."""
    folder = rig.folder / "cases"
    folder.mkdir()
    for name, content in (("f.txt", "hello world\n"), ("empty", ""), ("sp ace.txt", "ab\n")):
        (folder / name).write_text(content)
    (folder / "x755").write_text("#!/bin/sh\necho hi!\n"[:18])
    (folder / "x755").chmod(0o755)
    (folder / "adir").mkdir()
    rig.exec_in_container(["useradd", "--uid", "1001", "--user-group", "bob"], check=True)
    return folder


@pytest.fixture(scope="module")
def replayed(rig: Rig, folder: Path) -> Iterator[dict[int, subprocess.CompletedProcess[str]]]:
    passwd = rig.exec_in_container(["cat", "/etc/passwd"], check=True).stdout
    volume = rig.folder / "lxc" / f"{rig.folder.name}-{rig.container_id}" / "upper"
    aside = volume.with_name("upper.aside")
    results = {}
    for case in CASES:
        removed = case.stderr == [WITHOUT_VOLUME]
        if removed:
            volume.rename(aside)
        command = case.command.replace("/opt/cases", str(folder))
        results[id(case)] = rig.node_run(["bash", "-c", f"umask 022; {command}"], cwd=folder)
        if removed:
            aside.rename(volume)
        if case.title.startswith(OVERWRITES_PASSWD):
            rig.exec_in_container(["tee", "/etc/passwd"], stdin=passwd, check=True)
    yield results
    rig.start_container()


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{CASES.index(case)}: {case.command[:60]}")
def test_case(case: Case, replayed: dict[int, subprocess.CompletedProcess[str]], folder: Path) -> None:
    if case.title.startswith(NEEDS_PIP3) and shutil.which("pip3", path="/bin") is None:
        pytest.skip("this machine has no /bin/pip3")
    result = replayed[id(case)]
    passwd_bytes = Path("/etc/passwd").stat().st_size
    shape: Callable[[list[str]], object] = list
    wanted_stderr: object = _normalised(case.stderr, passwd_bytes)
    stderr: object = _normalised(result.stderr.splitlines(), passwd_bytes)
    if case.title.startswith(CONCURRENT):
        shape = sorted
        lines = result.stderr.splitlines()
        assert set(lines) <= set(case.stderr)
        assert lines.count("trying to acquire lock...") == lines.count(" OK")
        wanted_stderr = stderr
    assert {
        "stdout": shape(_normalised(result.stdout.splitlines(), passwd_bytes)),
        "stderr": stderr,
        "status": result.returncode,
    } == {
        "stdout": shape(_normalised(case.stdout, passwd_bytes)),
        "stderr": wanted_stderr,
        "status": case.status,
    }
