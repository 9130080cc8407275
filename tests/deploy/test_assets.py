"""A playbook's assets: named once, checked before the canary, sent once, and told in the run's record."""

from __future__ import annotations

import hashlib
import json
import platform
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.commands import TINY, Desk


def write_playbook(desk: Desk, assets: dict[str, Any], **training: Any) -> None:
    desk.write_playbook(workload={"target": "asset:model"}, training={"prompts": "asset:questions", **training})
    path = desk.folder / "playbooks" / "tiny.yaml"
    path.write_text(json.dumps({**json.loads(path.read_text()), "assets": assets}))


@pytest.fixture
def assets(desk: Desk) -> dict[str, Any]:
    """The target lies here and is to be sent; the prompts lie on the host."""
    model = desk.folder / "playbooks" / "models" / "target.json"
    model.parent.mkdir()
    model.write_bytes((TINY / "target.json").read_bytes())
    prompts = desk.folder / "prompts.jsonl"
    prompts.write_bytes((TINY / "prompts.jsonl").read_bytes())
    sha256 = hashlib.sha256(prompts.read_bytes()).hexdigest()
    return {"model": {"upload": "models/target.json"}, "questions": {"path": str(prompts), "sha256": sha256}}


def test_a_deploy_with_assets(desk: Desk, assets: dict[str, Any]) -> None:
    write_playbook(desk, assets)
    size, sha256 = (
        (TINY / "target.json").stat().st_size,
        hashlib.sha256((TINY / "target.json").read_bytes()).hexdigest(),
    )
    asked = desk.run("doctor", "--playbook", "tiny")
    assert asked.code == 0, asked.out
    assert any("still to be sent" in one["what"] for one in asked.named("diagnosis"))
    assert not (desk.folder / "work" / "assets").exists()

    first = desk.deploy()
    assert first.code == 0, first.out + first.err
    assert [event["bytes"] for event in first.named("sent")] == [size]
    folder = Path(first.result["folder"])
    there = str(desk.folder / "work" / "assets" / sha256 / "target.json")
    record = json.loads((folder / "run.json").read_text())
    assert record["assets"] == {
        "model": {"path": there, "sha256": sha256},
        "questions": {"path": assets["questions"]["path"], "sha256": assets["questions"]["sha256"]},
    }
    assert record["packages"]["pytest"] == pytest.__version__
    report = (folder / "report.md").read_text()
    assert f"- python: {platform.python_version()} at {sys.executable}, " in report
    settings = json.loads((folder / "settings.json").read_text())
    assert settings["workload"]["target"] == there
    assert settings["training"]["prompts"] == assets["questions"]["path"]
    assert f"- asset model: {there}, sha256 {sha256}" in report

    asked = desk.run("doctor", "--playbook", "tiny")
    assert any(one["what"].startswith(f"asset model: {there}, ") for one in asked.named("diagnosis"))

    resumed = desk.run("resume", "--set", "steps=16")
    assert resumed.code == 0, resumed.out
    assert resumed.named("sent") == []
    assert resumed.named("verdict")[0]["reused"]
    child = json.loads((Path(resumed.result["folder"]) / "run.json").read_text())
    assert child["assets"] == record["assets"]


def test_a_folder_of_small_and_large_files_comes_whole(desk: Desk, assets: dict[str, Any]) -> None:
    rows = desk.folder / "rows"
    content = {f"part-{number % 7}/{number:03}.json": bytes([number]) * number * 40 for number in range(120)}
    content["large.bin"] = bytes(range(256)) * 4000
    for name, data in content.items():
        (rows / name).parent.mkdir(parents=True, exist_ok=True)
        (rows / name).write_bytes(data)
    write_playbook(desk, {**assets, "rows": {"upload": str(rows)}})
    done = desk.run("canary", "--playbook", "tiny")
    assert done.code == 0, done.out
    sent = next(event for event in done.named("sent") if event["asset"] == "rows")
    assert sent["bytes"] == sum(map(len, content.values()))
    there = Path(sent["path"])
    assert {str(file.relative_to(there)): file.read_bytes() for file in there.rglob("*") if file.is_file()} == content


def test_wrong_content_stops_before_the_canary(desk: Desk, assets: dict[str, Any]) -> None:
    Path(assets["questions"]["path"]).write_text("{}\n")
    write_playbook(desk, assets)
    done = desk.deploy()
    assert (done.code, done.error["kind"]) == (5, "doctor")
    assert "asset questions" in done.error["what"]
    assert assets["questions"]["sha256"] in done.error["what"]
    assert done.named("canary") == done.named("sent") == []


def test_what_cannot_be_sent_is_told(desk: Desk, assets: dict[str, Any]) -> None:
    for change, why in ({"upload": "models/none"}, "nothing of that name"), ({"sha256": "0" * 64}, "fingerprint"):
        write_playbook(desk, {**assets, "model": {**assets["model"], **change}})
        done = desk.run("doctor", "--playbook", "tiny")
        assert (done.code, done.error["kind"]) == (2, "asset")
        assert why in done.error["what"]
