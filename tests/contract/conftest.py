"""One desk for each way to a host. The suite knows no transport: what one of them cannot do is a failure."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.commands import Desk, local_desk
from tests.rig.rig import Rig

WAYS = [
    pytest.param("local"),
    pytest.param("ssh", marks=pytest.mark.rig),
    pytest.param("pct-stream", marks=pytest.mark.rig),
    pytest.param("pct-push", marks=pytest.mark.rig),
]


def ssh_section(rig: Rig, user: str = "root") -> str:
    return (
        "ssh:\n"
        f"  address: 127.0.0.1\n  port: {rig.port}\n  user: {user}\n"
        f"  identity_file: {rig.identity}\n  known_hosts: {rig.known_hosts}\n"
    )


def pct_host(
    rig: Rig,
    *,
    transfer: str = "stream",
    container: int | None = None,
    workdir: str = "/var/lib/x",
    plain: bool = False,
) -> str:
    """`plain`: as an inventory has it that names no pct; else everything goes through the rig's."""
    command = "" if plain else f"  command: {rig.folder / 'sbin' / 'pct'}\n"
    return (
        f"transport: pct\npython: {sys.executable}\nworkdir: {workdir}\n{ssh_section(rig)}"
        f"pct:\n  id: {container or rig.container_id}\n  transfer: {transfer}\n{command}"
    )


def ssh_host(rig: Rig, workdir: Path) -> str:
    return f"transport: ssh\npython: {sys.executable}\nworkdir: {workdir}\n{ssh_section(rig)}"


@pytest.fixture(params=WAYS)
def desk(request: pytest.FixtureRequest, tmp_path: Path) -> Desk:
    """A workstation with one host, reached in one of the ways."""
    desk = local_desk(tmp_path)
    way = request.param
    if way == "local":
        return desk
    rig: Rig = request.getfixturevalue("rig")
    if way == "ssh":
        desk.write_host("box", ssh_host(rig, tmp_path / "work"))
    else:
        transfer, workdir = way.removeprefix("pct-"), f"/var/lib/{tmp_path.name}"
        # streamed as most people have it, pushed through pct alone
        desk.write_host("box", pct_host(rig, transfer=transfer, workdir=workdir, plain=transfer == "stream"))
    return desk
