"""Collecting over a link that is shared and that breaks."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from tests.commands import Desk, local_desk
from tests.contract.conftest import pct_host, ssh_host
from tests.rig.rig import Rig

pytestmark = pytest.mark.rig


@pytest.mark.parametrize("way", ["ssh", "pct"])
def test_a_cut_link_is_met_again_by_the_same_command(rig: Rig, tmp_path: Path, way: str) -> None:
    desk: Desk = local_desk(tmp_path)
    desk.write_host(
        "box", ssh_host(rig, tmp_path / "work") if way == "ssh" else pct_host(rig, workdir=f"/var/lib/{tmp_path.name}")
    )
    desk.write_playbook("slow", faults=("slow-steps",), training={"steps": 2000, "checkpoint_every": 20})
    run = desk.deploy("--detach", playbook="slow").result["run"]
    with desk.started("collect", "-f") as process:
        process.until_event("checkpoint")
        cut = rig.node_run(["pkill", "-KILL", "-f", "sshd: root"])
        assert cut.returncode == 0, "there was no connection to cut"
        process.until_event("link_lost")
        assert desk.run("stop").code == 0
        events = process.rest()
        assert process.code == 0
    assert events[-1]["state"] == "STOPPED"
    folder = desk.runs / run
    assert (folder / json.loads((folder / "result.json").read_bytes())["checkpoint"] / "manifest.json").exists()
    assert not (folder / ".incoming").exists()


def test_a_large_file_comes_over_several_channels(rig: Rig, tmp_path: Path) -> None:
    desk = local_desk(tmp_path)
    desk.write_host("box", ssh_host(rig, tmp_path / "work"))
    run = desk.deploy().result["run"]
    # as a larger drafter would have left it
    there = tmp_path / "work/runs" / run / "out/checkpoints/step-000099"
    there.mkdir()
    weights = hashlib.shake_256(b"seed").digest(1 << 20) * 70
    (there / "model.safetensors").write_bytes(weights)
    sha256 = hashlib.sha256(weights).hexdigest()
    entry = {"path": "model.safetensors", "size": len(weights), "sha256": sha256, "role": "weights"}
    (there / "manifest.json").write_text(json.dumps({"v": 1, "kind": "checkpoint", "step": 99, "files": [entry]}))
    brought = desk.run("collect")
    assert brought.code == 0, brought.out + brought.err
    (checkpoint,) = brought.named("checkpoint")
    assert checkpoint["bytes"] == len(weights)
    assert (desk.runs / run / "checkpoints/step-000099/model.safetensors").read_bytes() == weights
