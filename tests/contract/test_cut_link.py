"""A link that is cut: a run is followed from the cursor, every line once; an upload goes on where it was."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from dflash_ops.deploy.pushing import PIECE_BYTES
from tests.commands import TINY, Desk, local_desk
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


CUTTING_PCT = """\
#!/bin/sh
if [ "$1" = push ]; then
    wc -c < "$3" >> "$0.sizes"
    if [ "$(wc -l < "$0.sizes")" -eq 2 ]; then
        head -c 1000 "$3" > "$3.half"
        {pct} push "$2" "$3.half" "$4"
        pkill -KILL -f "sshd: root"
        exit 255
    fi
fi
exec {pct} "$@"
"""
"""The second push breaks off: 1000 bytes arrive, and the link is cut."""


def test_an_upload_by_push_goes_on_after_the_last_piece_that_arrived(rig: Rig, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(TINY, source / "tiny_trainer", ignore=shutil.ignore_patterns("__pycache__", "faults"))
    (source / "tiny_trainer" / "noise.dat").write_bytes(os.urandom(2 * PIECE_BYTES + 1000))
    cutting = rig.folder / "cutting-pct"
    cutting.write_text(CUTTING_PCT.format(pct=rig.folder / "sbin" / "pct"))
    cutting.chmod(0o755)
    desk = local_desk(tmp_path)
    host = pct_host(rig, transfer="push", workdir=f"/var/lib/{tmp_path.name}")
    desk.write_host("box", host.replace(str(rig.folder / "sbin" / "pct"), str(cutting)))
    playbook = desk.folder / "playbooks" / "tiny.yaml"
    told = json.loads(playbook.read_text())
    told["trainer"] |= {"source": str(source), "include": ["tiny_trainer/*"]}
    playbook.write_text(json.dumps(told))
    done = desk.deploy("--detach", "--skip-canary", "--reason", "only the upload is looked at")
    assert done.code == 0, done.out + done.err
    assert len(done.named("link_lost")) == 1
    whole = done.named("staged")[0]["sent"]
    sizes = [int(line) for line in (rig.folder / "cutting-pct.sizes").read_text().split()]
    assert sizes == [PIECE_BYTES, PIECE_BYTES, PIECE_BYTES, whole - 2 * PIECE_BYTES]
    assert rig.left_of_pushes() == []
    releases = ["find", f"/var/lib/{tmp_path.name}/releases", "-mindepth", "1", "-maxdepth", "1"]
    assert rig.exec_in_container(releases).stdout.count("\n") == 1
