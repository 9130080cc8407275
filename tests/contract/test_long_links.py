"""A link with a long round trip, and one that swallows everything: over a real sshd, behind a proxy that delays."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dflash_ops.config import load_host
from dflash_ops.errors import TransportError
from dflash_ops.transport import Conversation, Transport, transport_for
from tests.commands import Desk, eventually, local_desk
from tests.contract.conftest import pct_host, ssh_host
from tests.rig.delay import Link, delayed
from tests.rig.rig import Rig

pytestmark = pytest.mark.rig

RTT_MS = 60
BEAT_S = 2.0
"""Long enough for a busy machine, short enough to wait for three."""


@pytest.fixture
def link(rig: Rig) -> Iterator[Link]:
    with delayed(rig.port, RTT_MS) as link:
        yield link


def way_over(link: Link, rig: Rig, tmp_path: Path, text: str) -> Transport:
    desk: Desk = local_desk(tmp_path)
    known = tmp_path / "known_hosts"
    known.write_text(rig.known_hosts.read_text().replace(f":{rig.port}", f":{link.port}"))
    text = text.replace(f"port: {rig.port}", f"port: {link.port}").replace(str(rig.known_hosts), str(known))
    desk.write_host("far", text)
    host, _ = load_host("far", desk.folder / "hosts", env={}, last_host=None)
    return transport_for(host, lambda text: None)


def test_a_long_link_holds_more_than_the_usual_window(rig: Rig, tmp_path: Path, link: Link) -> None:
    """Eight MiB are sent before anything is read: with 2 MiB the program would hang in its write."""
    way = way_over(link, rig, tmp_path, ssh_host(rig, tmp_path / "work"))
    script = "import os,sys; [os.write(1, bytes(1 << 20)) for _ in range(8)]; sys.stderr.write('all sent')"
    channel = way.open([sys.executable, "-I", "-c", script])
    eventually(lambda: channel.stderr() == "all sent")
    got = 0
    while block := channel.read(1 << 20):
        got += len(block)
    assert got == 8 << 20
    way.close()


@pytest.mark.parametrize("kind", ["ssh", "pct"])
def test_a_link_that_swallows_everything_is_noticed_at_both_ends(
    rig: Rig, tmp_path: Path, link: Link, kind: str
) -> None:
    work = f"/var/lib/{tmp_path.name}" if kind == "pct" else str(tmp_path / "work")
    text = pct_host(rig, workdir=work) if kind == "pct" else ssh_host(rig, Path(work))
    way = way_over(link, rig, tmp_path, text)
    conversation = Conversation(way, python=sys.executable, workdir=work, host="far", beat=BEAT_S)
    conversation.request("lock", {"owner": "ann@desk", "command": "deploy"})

    def locked() -> bool:
        look = ["test", "-e", f"{work}/lock/owner.json"]
        return (rig.exec_in_container(look) if kind == "pct" else rig.node_run(look)).returncode == 0

    assert locked()
    link.freeze()
    with pytest.raises(TransportError) as silence:
        conversation.request("runs")
    assert silence.value.lost
    assert f"no sign of life from the agent for {3 * BEAT_S:g} s" in silence.value.what
    # and the agent, which hears nothing either, has let go of the host
    eventually(lambda: not locked())
    conversation.close()
    way.close()


def test_a_command_that_cannot_be_run_is_told(rig: Rig, tmp_path: Path, link: Link) -> None:
    """Nothing waits for the answer to the start of a program."""
    way = way_over(link, rig, tmp_path, ssh_host(rig, tmp_path / "work"))
    channel = way.open(["/no/such/program"])
    assert channel.read(100) == b""
    assert channel.wait(120) == 127
    assert "No such file" in channel.stderr()
    way.close()
