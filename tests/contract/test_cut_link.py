"""A link that is cut while a run is followed: met again from the cursor, every line once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.commands import Desk, local_desk
from tests.contract.conftest import pct_host, ssh_host
from tests.rig.rig import Rig

pytestmark = pytest.mark.rig


@pytest.mark.parametrize("way", ["ssh", "pct"])
def test_every_line_once_over_a_cut_link(rig: Rig, tmp_path: Path, way: str) -> None:
    desk: Desk = local_desk(tmp_path)
    desk.write_host(
        "box", ssh_host(rig, tmp_path / "work") if way == "ssh" else pct_host(rig, workdir=f"/var/lib/{tmp_path.name}")
    )
    desk.write_playbook("slow", faults=("slow-steps",), training={"steps": 5000})
    run = desk.deploy("--detach", playbook="slow").result["run"]
    with desk.started("tail-logs", "-f") as process:
        process.until_event("log")
        cut = rig.node_run(["pkill", "-KILL", "-f", "sshd: root"])
        assert cut.returncode == 0, "there was no connection to cut"
        process.until_event("link_lost")
        assert desk.run("stop").code == 0
        assert process.rest()[-1]["state"] == "STOPPED"
    assert desk.run("collect", run).code == 0
    log = (desk.runs / run / "log" / "000000.log").read_text().splitlines()
    assert [event["line"] for event in process.heard if event["event"] == "log"] == log
