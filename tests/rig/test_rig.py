"""The rig itself: what other tests rely on."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rig.requirements import STATES
from tests.rig.rig import Rig

pytestmark = pytest.mark.rig


def over_ssh(rig: Rig, command: str, *options: str, host: str = Rig.node) -> subprocess.CompletedProcess[str]:
    argv = rig.ssh_argv(command, host=host)
    return subprocess.run([argv[0], *options, *argv[1:]], capture_output=True, text=True, check=False, timeout=240)


def test_a_systemd_unit_in_the_container_gives_its_exit_status_through_ssh_and_pct(rig: Rig) -> None:
    done = over_ssh(rig, "pct exec 200 -- systemd-run --wait --pipe --collect --quiet sh -c 'exit 9'")
    assert (done.returncode, done.stdout, done.stderr) == (9, "", "")


def test_the_container_sees_this_python_and_its_packages(rig: Rig) -> None:
    program = "import sys, pytest; print(sys.prefix, pytest.__version__)"
    done = over_ssh(rig, f"pct exec 200 -- {sys.executable} -c '{program}'")
    assert done.stdout.split() == [sys.prefix, pytest.__version__], done.stderr


def test_the_container_is_unprivileged_and_has_a_world_of_its_own(rig: Rig, tmp_path: Path) -> None:
    assert rig.exec_in_container(["cat", "/proc/self/uid_map"]).stdout.split() == ["0", "100000", "65536"]
    assert rig.exec_in_container(["hostname"]).stdout == "ct200\n"
    assert rig.exec_in_container(["cat", "/proc/1/comm"]).stdout == "systemd\n"
    rig.exec_in_container(["touch", "/etc/made-inside"], check=True)
    assert not Path("/etc/made-inside").exists()
    assert rig.exec_in_container(["ls", str(rig.folder)]).returncode != 0


def test_stop_and_start_keep_files(rig: Rig) -> None:
    rig.exec_in_container(["tee", "/var/kept"], stdin="still here", check=True)
    rig.stop_container()
    assert rig.node_run(["pct", "status", "200"]).stdout == "status: stopped\n"
    rig.start_container()
    assert rig.exec_in_container(["cat", "/var/kept"]).stdout == "still here"


def test_other_containers_are_stopped_and_missing(rig: Rig) -> None:
    assert rig.node_run(["pct", "status", str(rig.stopped_container_id)]).stdout == "status: stopped\n"
    assert rig.node_run(["pct", "status", str(rig.missing_container_id)]).returncode == 2


def test_sshd_refuses_an_unknown_key(rig: Rig, tmp_path: Path) -> None:
    stranger = tmp_path / "stranger"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(stranger)], check=True)
    config = tmp_path / "ssh_config"
    config.write_text(rig.ssh_config.read_text().replace(str(rig.identity), str(stranger)))
    refused = subprocess.run(
        ["ssh", "-F", str(config), rig.node, "true"], capture_output=True, text=True, check=False, timeout=240
    )
    assert refused.returncode == 255
    assert "Permission denied (publickey)" in refused.stderr


def test_host_key_is_the_one_announced(rig: Rig) -> None:
    scanned = subprocess.run(
        ["ssh-keyscan", "-t", "ed25519", "-p", str(rig.port), "127.0.0.1"],
        capture_output=True,
        text=True,
        check=True,
    )
    shown = subprocess.run(
        ["ssh-keygen", "-l", "-f", "-"], input=scanned.stdout, capture_output=True, text=True, check=True
    )
    assert rig.host_key_fingerprint.startswith("SHA256:")
    assert shown.stdout.split()[1] == rig.host_key_fingerprint


def test_a_host_key_that_nobody_announced_is_refused(rig: Rig, tmp_path: Path) -> None:
    empty = tmp_path / "known_hosts"
    empty.touch()
    refused = over_ssh(rig, "true", "-o", f"UserKnownHostsFile={empty}")
    assert refused.returncode == 255
    assert "Host key verification failed" in refused.stderr


def test_the_same_sshd_serves_as_a_plain_host(rig: Rig, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("seen from both sides")
    seen = over_ssh(rig, f"cat {tmp_path}/file /proc/1/comm", host=rig.box)
    assert seen.stdout.startswith("seen from both sides")
    assert "systemd" not in seen.stdout


def test_full_disk_is_full_and_goes_away(rig: Rig) -> None:
    with rig.full_disk("/srv/tiny", 64 << 10):
        written = rig.exec_in_container(["dd", "if=/dev/zero", "of=/srv/tiny/file", "bs=1k", "count=100"])
        assert "No space left on device" in written.stderr
    assert rig.exec_in_container(["findmnt", "/srv/tiny"]).returncode == 1


@pytest.fixture
def venv_below_tmp() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="rig venv ") as folder:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
        yield Path(folder)


SECOND_RIG = """
import os, signal, sys
from tests.rig.rig import Rig
rig = Rig()
rig.up()
argv = [sys.executable, "-c", "import sys; print(sys.prefix); open(sys.prefix + '/written', 'w')"]
done = rig.node_run(["pct", "exec", "200", "--", *argv])
print(rig.folder, done.stdout, done.stderr.splitlines()[-1], sep="\\n", flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def processes_of(name: str) -> list[str]:
    found = []
    for cmdline in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found += [cmdline.read_text(errors="replace")]
    return [line for line in found if name in line]


def test_a_second_rig_from_a_hidden_venv_whose_owner_is_killed_leaves_nothing(rig: Rig, venv_below_tmp: Path) -> None:
    root = Path(__file__).parents[2]
    killed = subprocess.run(
        [venv_below_tmp / "bin/python", "-c", SECOND_RIG],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    folder, prefix, *_, error = killed.stdout.splitlines()
    # The interpreter's own folder is inside, read-only, though /tmp inside is another.
    assert prefix == str(venv_below_tmp)
    assert "Read-only file system" in error

    # Its processes end by themselves; its folder goes with the next rig that starts.
    name = Path(folder).name
    deadline = time.monotonic() + 240
    while left := processes_of(name):
        assert time.monotonic() < deadline, left
        time.sleep(0.05)
    start_and_end = "from tests.rig.rig import Rig; Rig().down()"
    subprocess.run([sys.executable, "-c", start_and_end], cwd=root, check=True)
    folders = [path.name for path in STATES.glob("dflash-rig-*")]
    assert name not in folders
    assert rig.folder.name in folders
    assert not list(Path("/sys/fs/cgroup").rglob(f"*{name}*"))
    assert name not in Path("/proc/self/mountinfo").read_text()
    assert rig.exec_in_container(["true"]).returncode == 0
