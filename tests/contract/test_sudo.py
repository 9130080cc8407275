"""Nobody logs in on the node as root: `become: sudo`, with what sudo and pct say where that is not set up."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.commands import Desk, local_desk
from tests.contract.conftest import ssh_section
from tests.rig.rig import Rig

pytestmark = pytest.mark.rig


def node_host(rig: Rig, desk: Desk, user: str, *, become: str = "sudo", transfer: str = "stream") -> str:
    return (
        f"transport: pct\npython: {sys.executable}\nworkdir: /var/lib/{desk.folder.name}\n{ssh_section(rig, user)}"
        f"pct:\n  id: {rig.container_id}\n  transfer: {transfer}\n  become: {become}\n"
    )


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    desk = local_desk(tmp_path)
    desk.write_playbook()
    return desk


@pytest.mark.parametrize("transfer", ["stream", "push"])
def test_a_deploy_by_a_user_whom_sudo_gives_pct_alone(rig: Rig, desk: Desk, transfer: str) -> None:
    desk.write_host("box", node_host(rig, desk, rig.operator, transfer=transfer))
    done = desk.deploy()
    assert done.code == 0, done.out + done.err
    assert (Path(done.result["folder"]) / "exit.json").exists()
    owners = rig.exec_in_container(["stat", "-c", "%u", f"/var/lib/{desk.folder.name}"], check=True).stdout
    assert owners.split() == ["0"]
    assert rig.left_of_pushes() == []


@pytest.mark.parametrize(
    ("user", "become", "what", "fix"),
    [
        ("limited", "sudo", "sudo on the node", "allow `sudo -n /usr/sbin/pct` without a password in sudoers"),
        ("operator", "none", "pct must run as root on the node", "set `become: sudo`"),
    ],
)
def test_what_is_not_set_up_is_said(rig: Rig, desk: Desk, user: str, become: str, what: str, fix: str) -> None:
    desk.write_host("box", node_host(rig, desk, getattr(rig, user), become=become))
    done = desk.deploy()
    assert done.code == 4, done.out + done.err
    assert done.error["what"].startswith(what)
    assert fix in done.error["fix"]
    there = rig.exec_in_container(["ls", f"/var/lib/{desk.folder.name}"])
    assert there.returncode != 0, "nothing was begun in the container"


def test_without_root_everything_goes_through_pct(rig: Rig, desk: Desk) -> None:
    """lxc-attach itself needs root: it is not even tried."""
    tool, tried = rig.folder / "sbin" / "lxc-attach", rig.folder / f"tried-{desk.folder.name}"
    works = tool.read_text()
    tried.touch(mode=0o666)
    tried.chmod(0o666)
    desk.write_host("box", node_host(rig, desk, rig.operator))
    # by its node's name only the direct way calls it: the rig's pct has options of its own
    tool.write_text(works.replace("id=$2;", f"echo x >> {tried}; id=$2;"))
    try:
        assert desk.type("doctor", "--host", "box").code in (0, 5)
    finally:
        tool.write_text(works)
    assert tried.read_text() == ""
