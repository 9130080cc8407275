"""Into a container: as `pct exec` does, without the second that pct takes to start; through pct where that is asked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from dflash_ops.config import load_host
from dflash_ops.transport import transport_for
from dflash_ops.transport.node import END, parse_node
from dflash_ops.transport.pct import CONTAINER_PATH, PctTransport
from tests.commands import Desk, local_desk
from tests.contract.conftest import pct_host
from tests.rig.rig import Rig

pytestmark = pytest.mark.rig


@pytest.fixture
def desk(tmp_path, rig: Rig) -> Desk:
    return local_desk(tmp_path)


@contextmanager
def way(desk: Desk, text: str) -> Iterator[PctTransport]:
    desk.write_host("box", text)
    host, _ = load_host("box", desk.folder / "hosts", env={}, last_host=None)
    made = transport_for(host, lambda text: None)
    assert isinstance(made, PctTransport)
    try:
        yield made
    finally:
        made.close()


def output_of(transport: PctTransport, *argv: str) -> str:
    channel = transport.open(argv)
    try:
        found = b""
        while data := channel.read(4096):
            found += data
        return found.decode()
    finally:
        channel.close()


@pytest.mark.parametrize("plain", [True, False], ids=["lxc-attach", "pct"])
def test_the_program_finds_the_same_place_either_way(rig: Rig, desk: Desk, plain: bool) -> None:
    script = "env; echo; pwd; id -u; cat /proc/1/comm; hostname; readlink /proc/self/fd/0"
    with way(desk, pct_host(rig, plain=plain)) as transport:
        said = output_of(transport, "/bin/sh", "-c", script)
    node, _, rest = said.rpartition(f"{END}\n")
    environment, _, place = rest.partition("\n\n")
    assert parse_node(node + f"{END}\n") is not None
    told = {line for line in environment.splitlines() if not line.startswith(("PWD=", "SHLVL=", "_=", "OLDPWD="))}
    assert told == {f"PATH={CONTAINER_PATH}", "LANG=C.UTF-8", "HOME=/root"}
    _folder, uid, init, hostname, stdin = place.split()
    assert (uid, init, hostname) == ("0", "systemd", f"ct{rig.container_id}")
    assert stdin.startswith(("pipe:", "socket:"))


@pytest.mark.parametrize("instead", ["exit 1", "sleep 60"], ids=["fails", "hangs"])
def test_where_lxc_attach_does_not_work_pct_is_the_way(rig: Rig, desk: Desk, instead: str) -> None:
    tool = rig.folder / "sbin" / "lxc-attach"
    works = tool.read_text()
    with way(desk, pct_host(rig, plain=True)) as transport:
        # only the trial, which names the container as Proxmox does: the rig's pct has options of its own
        tool.write_text(works.replace("id=$2;", f"{instead};"))
        try:
            assert output_of(transport, "/bin/echo", "inside").endswith(f"{END}\ninside\n")
        finally:
            tool.write_text(works)


@pytest.mark.parametrize("plain", [True, False], ids=["lxc-attach", "pct"])
def test_pct_is_started_only_where_it_is_asked_for(rig: Rig, desk: Desk, plain: bool) -> None:
    """Its options are the evidence: `pct exec` keeps the node's environment until `env -i`."""
    mark = f"way-in-{desk.folder.name}"
    with way(desk, pct_host(rig, plain=plain)) as transport:
        channel = transport.open(["/bin/sh", "-c", f": {mark}; echo up; cat"])
        try:
            said = b""
            while b"up\n" not in said:
                said += channel.read(4096)
            ran = rig.node_run(["pgrep", "-a", "-f", f"lxc-attach .*{mark}"]).stdout
        finally:
            channel.close()
    assert ("--clear-env" in ran) == plain
    assert ("--keep-env" in ran) != plain


@pytest.mark.parametrize(("plain", "starts"), [(True, 0), (False, 1)], ids=["lxc-attach", "pct"])
def test_a_deploy_of_nothing_new_starts_pct_once_at_most(rig: Rig, desk: Desk, plain: bool, starts: int) -> None:
    pct, log = rig.folder / "sbin" / "pct", rig.folder / "pct-started"
    quiet = pct.read_text()
    desk.write_host("box", pct_host(rig, workdir=f"/var/lib/{desk.folder.name}", plain=plain))
    desk.write_playbook()
    assert desk.deploy().code == 0
    log.write_text("")
    pct.write_text(quiet.replace("#!/bin/sh\n", f'#!/bin/sh\necho "$@" >> {log}\n'))
    try:
        assert desk.deploy("--detach").code == 0
    finally:
        pct.write_text(quiet)
    assert len(log.read_text().splitlines()) == starts
