"""`deploy --init-from`: a run begins with another's weights, and with nothing else of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.commands import Desk

UNPROVEN = ("--skip-canary", "--reason", "beginnings are tested here")


def records(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = (folder / "metrics.ndjson").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


def test_from_a_run_of_the_host_and_from_what_came_home(desk: Desk) -> None:
    desk.write_playbook(training={"steps": 8, "checkpoint_every": 4})
    first = desk.deploy(*UNPROVEN)
    assert first.code == 0, first.out + first.err
    run, home = first.result["run"], Path(first.result["folder"])
    there = desk.folder / "work/runs" / run / "out/checkpoints"

    newest = desk.deploy("--init-from", run, *UNPROVEN)
    assert newest.code == 0, newest.out + newest.err
    assert newest.named("first_weights")[0]["step"] == 8
    folder = Path(newest.result["folder"])
    training = json.loads((folder / "settings.json").read_text())["training"]
    assert (training["init_from"], training["resume_from"]) == (str(there / "step-000008"), None)
    assert [record["step"] for record in records(folder, "step")] == list(range(1, 9))
    left, began = records(home, "evaluation")[-1], records(folder, "evaluation")[0]
    assert (left["when"], began["when"]) == ("end", "start")
    assert abs(left["loss"] - began["loss"]) < 1e-3 < abs(records(home, "evaluation")[0]["loss"] - began["loss"])
    assert f"- began with the weights of: {there / 'step-000008'}\n" in (folder / "report.md").read_text()
    # a run that goes on from its own checkpoint has nothing to do with them any more
    more = desk.run("resume", "--set", "steps=9", *UNPROVEN)
    assert more.code == 0, more.out + more.err
    assert "init_from" not in json.loads((Path(more.result["folder"]) / "settings.json").read_text())["training"]

    # brought home without the optimiser's state, and sent like an asset
    brought = home / "checkpoints" / "step-000004"
    assert not (brought / "resume").exists()
    (brought / "resume").mkdir()
    (brought / "resume" / "optimizer.safetensors").write_bytes(b"x" * 100_000)
    sent = desk.deploy("--init-from", str(brought), *UNPROVEN)
    assert sent.code == 0, sent.out + sent.err
    (asset,) = (desk.folder / "work/assets").iterdir()
    assert sorted(path.name for path in asset.iterdir()) == ["config.json", "manifest.json", "model.safetensors"]
    assert (asset / "model.safetensors").read_bytes() == (there / "step-000004/model.safetensors").read_bytes()
    record = json.loads((Path(sent.result["folder"]) / "run.json").read_text())
    assert record["assets"]["init-from"]["path"] == str(asset)

    other = desk.deploy("--init-from", f"{run}:5", *UNPROVEN)
    assert other.code == 2
    assert "no checkpoint of step 5" in other.error["what"]
    assert "4, 8" in other.error["fix"]


def test_what_is_no_checkpoint_is_refused_before_the_host_is_reached(desk: Desk, tmp_path: Path) -> None:
    desk.write_host("box", "transport: ssh\npython: python3\nssh: {address: 127.0.0.1, port: 1, known_hosts: known}\n")
    folder = tmp_path / "run"
    checkpoint = folder / "checkpoints" / "step-000004"
    checkpoint.mkdir(parents=True)
    files = [{"path": "model.safetensors", "size": 1, "sha256": "0" * 64, "role": "weights"}]

    def manifest(*more: dict[str, Any]) -> None:
        value = {"v": 1, "kind": "checkpoint", "step": 4, "files": [*files, *more]}
        (checkpoint / "manifest.json").write_text(json.dumps(value))

    def refused(text: str, *words: str) -> str:
        done = desk.deploy("--init-from", text, *words)
        assert (done.code, done.error["kind"]) == (2, "init_from"), done.out
        return f"{done.error['what']} {done.error['fix']}"

    manifest()
    assert f"name one of its checkpoints: {checkpoint}" in refused(str(folder))
    assert "model.safetensors is missing" in refused(str(checkpoint))
    (checkpoint / "model.safetensors").write_bytes(b"x")
    manifest({"path": "../../secret", "role": "config"})
    assert "names '../../secret'" in refused(str(checkpoint))
    manifest()
    assert "no folder here" in refused("./nowhere")
    assert "resume_from" in refused(str(checkpoint), "--set", "resume_from=/c")
    plan = desk.deploy("--init-from", str(checkpoint), "--dry-run")
    assert f"from the weights of {checkpoint}" in str(plan.named("plan")[0]["steps"])
