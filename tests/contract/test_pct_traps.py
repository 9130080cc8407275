"""What a real pct does to who trusts it (tests/rig/pct_transcript.txt), and what our commands make of it.

Elsewhere: exit 0 when nothing was copied for want of space, a missing or stopped container, a missing program
(test_hosts_that_refuse.py); arguments that look like options (test_transports.py).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dflash_ops.config import load_host
from dflash_ops.errors import OpsError
from dflash_ops.transport import Conversation, transport_for
from dflash_ops.transport.node import END
from dflash_ops.transport.pct import CONTAINER_PATH, PctTransport
from tests.commands import Desk, eventually, local_desk
from tests.contract.conftest import pct_host
from tests.rig.rig import Rig

pytestmark = pytest.mark.rig

PIECE = bytes(range(256)) * 1200
LOCK = f"/run/lock/lxc/pve-config-{Rig.container_id}.lock"
DIGEST = "0" * 64


@pytest.fixture
def desk(rig: Rig, tmp_path: Path) -> Desk:
    """A desk whose host is the container, and whose archives are pushed."""
    desk = local_desk(tmp_path)
    desk.write_host("box", pct_host(rig, transfer="push", workdir=f"/var/lib/{tmp_path.name}"))
    return desk


@pytest.fixture
def pct(desk: Desk) -> Iterator[PctTransport]:
    host, _ = load_host("box", desk.folder / "hosts", env={}, last_host=None)
    made = transport_for(host, lambda text: None)
    assert isinstance(made, PctTransport)
    yield made
    made.close()


@pytest.fixture
def conversation(desk: Desk, pct: PctTransport) -> Iterator[Conversation]:
    host, _ = load_host("box", desk.folder / "hosts", env={}, last_host=None)
    with Conversation(pct, python=sys.executable, workdir=host.workdir, host="box") as talk:
        yield talk


def output_of(pct: PctTransport, *argv: str) -> str:
    channel = pct.open(argv)
    data = b""
    while chunk := channel.read(65536):
        data += chunk
    channel.close()
    return data.decode()


@contextlib.contextmanager
def container_locked(rig: Rig) -> Iterator[None]:
    """As while a backup runs: the configuration lock is held."""
    command = f"flock {LOCK} sh -c 'echo held; exec sleep 120'"
    with subprocess.Popen(rig.ssh_argv(command), stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        try:
            yield
        finally:
            rig.node_run(["pkill", "-f", "^sleep 120"], check=True)
            holder.wait()


@pytest.fixture
def place(conversation: Conversation) -> str:
    """Where the agent expects a piece of an archive in the container."""
    return str(conversation.request("archive_begin", {"digest": DIGEST, "size": 10 * len(PIECE)})["piece"])


def refused(conversation: Conversation) -> OpsError:
    """What the agent says of the piece that pct claims to have pushed."""
    told = {"from": 0, "size": len(PIECE), "sha256": hashlib.sha256(PIECE).hexdigest()}
    with pytest.raises(OpsError) as error:
        conversation.request("archive_piece", {"digest": DIGEST, **told})
    return error.value


def left_of(rig: Rig, place: str) -> list[str]:
    """Bytes and name of what lies where releases do."""
    folder = str(Path(place).parent)
    return rig.exec_in_container(["find", folder, "-type", "f", "-printf", "%s %f\n"]).stdout.splitlines()


def test_a_push_that_failed_and_ended_with_0_is_told(pct: PctTransport) -> None:
    with pytest.raises(OpsError) as error:
        pct.push(PIECE, "/nowhere/piece")
    assert "failed to create file: /nowhere/piece" in error.value.what


def test_a_push_that_was_cut_short_without_a_word_counts_for_nothing(
    rig: Rig, pct: PctTransport, conversation: Conversation, place: str
) -> None:
    with rig.full_disk("/srv/short", 64 << 10):
        # pct says nothing here, and neither can we
        pct.push(PIECE, "/srv/short/piece")
        rig.exec_in_container(["cp", "/srv/short/piece", place], check=True)
    assert refused(conversation).kind == "archive"
    assert left_of(rig, place) == [f"0 {DIGEST}.tgz.part"]


def test_a_folder_that_arrives_as_an_empty_file_is_no_piece(rig: Rig, conversation: Conversation, place: str) -> None:
    pushed = rig.node_run(["pct", "push", str(rig.container_id), "/usr/share", place])
    assert (pushed.returncode, pushed.stderr) == (0, "")
    assert f"0 {DIGEST}.tgz.piece" in left_of(rig, place)
    assert refused(conversation).kind == "archive"
    assert left_of(rig, place) == [f"0 {DIGEST}.tgz.part"]


def test_a_push_waits_for_a_moment_while_the_container_is_locked(rig: Rig, pct: PctTransport) -> None:
    with container_locked(rig):
        pushing = subprocess.Popen(
            rig.ssh_argv(f"pct push {rig.container_id} /etc/hostname /srv/waited"), stderr=subprocess.PIPE, text=True
        )
        assert pushing.stderr is not None
        assert pushing.stderr.readline() == "trying to acquire lock...\n"
    # now two come one after the other; pct's chatter about it is no failure
    pct.push(PIECE, "/srv/piece")
    assert pushing.wait() == 0
    assert rig.exec_in_container(["stat", "--format=%s", "/srv/piece"]).stdout == f"{len(PIECE)}\n"


def test_what_a_push_that_was_killed_left_on_the_node_goes_a_day_later(rig: Rig, pct: PctTransport) -> None:
    old, new = (Path(tempfile.mkdtemp(prefix="dflash-ops.", dir="/tmp")) for _ in range(2))
    try:
        (old / "piece").write_bytes(PIECE)
        long_ago = time.time() - 90_000
        os.utime(old, (long_ago, long_ago))
        pct.push(PIECE, "/srv/piece")
        assert (old.exists(), new.exists()) == (False, True)
    finally:
        for path in (old, new):
            shutil.rmtree(path, ignore_errors=True)


def test_a_container_that_stays_locked_is_said_and_met_again(desk: Desk, rig: Rig) -> None:
    with contextlib.ExitStack() as stack:
        with container_locked(rig):
            process = stack.enter_context(desk.started("deploy", "--playbook", "tiny", "--detach"))
            # pct gives up after 10 s; what needs no push needs no lock
            assert desk.run("runs").code == 0
            assert "locked by another pct command" in process.until_event("link_lost")["what"]
        assert process.rest()[-1]["exit"] == 0
    assert rig.left_of_pushes() == []


def test_a_link_where_the_archive_goes_is_not_followed(desk: Desk, rig: Rig) -> None:
    release = desk.run("build", "--playbook", "tiny", host=False).result["release"]
    work = f"/var/lib/{desk.folder.name}"
    rig.exec_in_container(["mkdir", "--parents", f"{work}/releases"], check=True)
    for name in (f"{release}.tgz.part", f"{release}.tgz.piece"):
        rig.exec_in_container(["ln", "-s", "/etc/machine-id", f"{work}/releases/{name}"], check=True)
    before = rig.exec_in_container(["cat", "/etc/machine-id"]).stdout
    assert desk.deploy("--detach").code == 0
    assert rig.exec_in_container(["cat", "/etc/machine-id"]).stdout == before


def test_our_commands_leave_standard_input_alone(desk: Desk) -> None:
    """`pct exec` in a loop reads the lines that the loop is for."""
    words = " ".join(desk.argv("runs", "--host", "box"))
    loop = f'printf "a\\nb\\n" | while read line; do echo "line $line"; {words}; done'
    done = subprocess.run(
        ["sh", "-c", loop], cwd=desk.folder, env=desk.env(), capture_output=True, text=True, check=True
    )
    assert [line for line in done.stdout.splitlines() if line.startswith("line")] == ["line a", "line b"], done.stderr


def test_what_survives_a_killed_pct_does_not_survive_us(desk: Desk, rig: Rig) -> None:
    """pct's children in the container outlive it: a canary must not."""
    desk.write_playbook("hanging", faults=("worker-hangs",), workload={"canary_timeout_s": 600})
    with desk.started("deploy", "--playbook", "hanging") as process:
        process.until_event("canary")
        jobs = ["pgrep", "-f", "tiny_trainer canary"]
        eventually(lambda: rig.exec_in_container(jobs).returncode == 0)
        rig.node_run(["pkill", "-TERM", "-f", f"^(/usr/bin/)?lxc-attach .*/{desk.folder.name}"], check=True)
        result = process.rest()[-1]
        eventually(lambda: rig.exec_in_container(jobs).returncode == 1)
    assert (result["exit"], result["verdict"]) == (7, "inconclusive")


def test_neither_the_nodes_environment_nor_its_folder_reaches_the_container(rig: Rig, desk: Desk) -> None:
    leaky = rig.folder / "leaky-pct"
    leaky.write_text(f'#!/bin/sh\nexport LEAK=1 PYTHONPATH=/nowhere\ncd /usr/share\nexec {rig.folder}/sbin/pct "$@"\n')
    leaky.chmod(0o755)
    desk.write_host("box", pct_host(rig).replace(str(rig.folder / "sbin" / "pct"), str(leaky)))
    host, _ = load_host("box", desk.folder / "hosts", env={}, last_host=None)
    made = transport_for(host, lambda text: None)
    assert isinstance(made, PctTransport)
    try:
        # what the node says of itself comes first
        said = output_of(made, "/usr/bin/env").rpartition(f"{END}\n")[2]
    finally:
        made.close()
    assert set(said.split()) == {f"PATH={CONTAINER_PATH}", "LANG=C.UTF-8", "HOME=/root"}
