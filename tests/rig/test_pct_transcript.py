"""The rig's pct says, returns and does what a real one (pve-container 6.1.10) did: `pct_transcript.txt`.

The transcript is replayed once, in its order, by bash on the node; then every case is compared: standard output,
standard error, exit status. Normalised, and nothing else: what depends on the day and the machine (dates, node name,
PIDs, figures of use, limits, cgroup and the line numbers of lxc-attach), the rig's container name in lxc-attach's own
messages (`dflash-rig-PID-200` there, `200` here), and digests of random data.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.rig.rig import Rig

pytestmark = [pytest.mark.rig, pytest.mark.slow]

# Several pushes at once: who comes first, and how many had to wait for the lock, is chance.
CONCURRENT = "for i in 1 2 3 4 5 6 7 8; do"
OVERWRITES_PASSWD = "pct exec 200 -- ln -sfn /etc/passwd /root/lnk"
WITHOUT_VOLUME = "volume 'local:200/vm-200-disk-0.raw' does not exist"
NEEDS_PIP3 = "pct exec 200 -- which pip3"


@dataclass(frozen=True)
class Case:
    command: str
    stdout: list[str]
    stderr: list[str]
    status: int


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
    return [case for case in cases if case.command != NEEDS_PIP3 or Path("/bin/pip3").exists()]


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
    for name, content in (
        ("f.txt", "hello world\n"),
        ("empty", ""),
        ("sp ace.txt", "ab\n"),
        ("x755", "#!/bin/sh\necho hi\n"),
    ):
        (folder / name).write_text(content)
    (folder / "x755").chmod(0o755)
    (folder / "adir").mkdir()
    rig.exec_in_container(["useradd", "--uid", "1001", "--user-group", "bob"], check=True)
    return folder


@pytest.fixture(scope="module")
def replayed(rig: Rig, folder: Path) -> dict[int, subprocess.CompletedProcess[str]]:
    passwd = rig.exec_in_container(["cat", "/etc/passwd"], check=True).stdout
    volume = rig.folder / "lxc" / f"{rig.folder.name}-{rig.container_id}" / "upper"
    aside = volume.with_name("upper.aside")
    results = {}
    for case in CASES:
        without_volume = case.stderr == [WITHOUT_VOLUME]
        if without_volume:
            volume.rename(aside)
        command = case.command.replace("/opt/cases", str(folder))
        results[id(case)] = rig.node_run(["bash", "-c", f"umask 022; {command}"], cwd=folder)
        if without_volume:
            aside.rename(volume)
        if case.command.startswith(OVERWRITES_PASSWD):
            rig.exec_in_container(["tee", "/etc/passwd"], stdin=passwd, check=True)
    # The transcript ends with a container that is stopped; other tests share this one.
    rig.start_container()
    return results


@pytest.mark.parametrize("case", CASES, ids=[f"{number}: {case.command[:60]}" for number, case in enumerate(CASES)])
def test_case(case: Case, replayed: dict[int, subprocess.CompletedProcess[str]], rig: Rig) -> None:
    result = replayed[id(case)]
    passwd_bytes = int(rig.node_run(["stat", "-c", "%s", "/etc/passwd"], check=True).stdout)
    got = [_normalised(text.splitlines(), passwd_bytes) for text in (result.stdout, result.stderr)]
    wanted = [_normalised(lines, passwd_bytes) for lines in (case.stdout, case.stderr)]
    if case.command.startswith(CONCURRENT):
        assert set(got[1]) <= set(wanted[1])
        assert got[1].count("trying to acquire lock...") == got[1].count(" OK")
        got, wanted = [sorted(got[0])], [sorted(wanted[0])]
    assert (*got, result.returncode) == (*wanted, case.status)


def test_push_to_a_full_disk_writes_a_part_and_exits_0(rig: Rig, folder: Path) -> None:
    (folder / "large").write_bytes(bytes(300_000))
    with rig.full_disk("/srv/small", 128 << 10):
        pushed = rig.node_run(["pct", "push", "200", str(folder / "large"), "/srv/small/large"])
        size = rig.exec_in_container(["stat", "--format=%s", "/srv/small/large"], check=True).stdout
    assert (pushed.returncode, pushed.stderr, int(size)) == (0, "", 128 << 10)


def test_push_told_to_end_says_so_and_takes_its_worker_with_it(rig: Rig, folder: Path) -> None:
    script = """
        mkfifo never
        pct push 200 never /root/never & pct=$!
        # The worker is the child with a session of its own.
        until worker=$(ps -o pid=,sid= --ppid $pct | awk '$1 == $2 {print $1}'); test -n "$worker"; do sleep 0.05; done
        kill -TERM $pct; wait $pct; test $? -ne 0 || echo "exited with 0"
        for _ in $(seq 200); do kill -0 $worker 2>/dev/null || exit; sleep 0.05; done
        echo "its worker lives"
    """
    ended = rig.node_run(["bash", "-c", script], cwd=folder)
    assert (ended.stdout, ended.stderr) == ("", "received interrupt\n")


def test_start_up_delay_does_not_reach_the_container(rig: Rig) -> None:
    listed = rig.node_run(["env", "PCT_STARTUP_MS=1", "OTHER=kept", "pct", "exec", "200", "--", "env"], check=True)
    names = [line.partition("=")[0] for line in listed.stdout.splitlines()]
    assert "OTHER" in names
    assert "PCT_STARTUP_MS" not in names
