"""`dflash-ops collect`: what a person has on their disk, whenever they look and however it was interrupted."""

from __future__ import annotations

import hashlib
import json
import signal
from pathlib import Path

from tests.commands import Desk


def whole(folder: Path) -> list[str]:
    """The checkpoints that are here; each has all that its manifest claims."""
    for checkpoint in (folder / "checkpoints").iterdir():
        for entry in json.loads((checkpoint / "manifest.json").read_bytes())["files"]:
            data = (checkpoint / entry["path"]).read_bytes()
            assert hashlib.sha256(data).hexdigest() == entry["sha256"], entry
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def test_follow_brings_each_checkpoint_as_it_appears(desk: Desk) -> None:
    desk.write_playbook("slow", faults=("slow-steps",), training={"steps": 2000, "checkpoint_every": 4})
    done = desk.deploy("--detach", playbook="slow")
    assert done.code == 0, done.out + done.err
    run = done.result["run"]
    folder = desk.runs / run
    with desk.started("collect", "--follow") as process:
        process.until_event("checkpoint")
        # another one may not bring the same run
        refused = desk.run("collect")
        assert refused.code == 9
        assert str(process.process.pid) in refused.error["what"]
        process.kill(signal.SIGINT)
        process.rest()
        assert process.code == 130
    first = whole(folder)
    assert first
    with desk.started("collect", "--follow") as process:
        process.until_event("checkpoint")
        assert desk.run("stop").code == 0
        process.rest()
        assert process.code == 0
    there = desk.folder / "work/runs" / run
    # those that the host keeps, and those that it does not keep any more
    assert set(whole(folder)) >= {*first, *(path.name for path in (there / "out/checkpoints").iterdir())}
    assert not (folder / ".incoming").exists()
    assert (folder / "log/000000.log").read_bytes() == (there / "log/000000.log").read_bytes()
    assert (folder / "metrics.ndjson").read_bytes() == (there / "out/metrics.ndjson").read_bytes()


def test_optimizer_state_comes_on_request(desk: Desk) -> None:
    done = desk.deploy()
    assert done.code == 0, done.out + done.err
    last = desk.runs / done.result["run"] / "checkpoints/step-000012"
    assert not (last / "resume").exists()
    assert desk.run("collect", "--last", "--optimizer").code == 0
    there = desk.folder / "work/runs" / done.result["run"] / "out/checkpoints/step-000012"
    for path in ("manifest.json", "resume/state.json", "resume/optimizer.safetensors"):
        assert (last / path).read_bytes() == (there / path).read_bytes()
    assert not (last.with_name("step-000008") / "resume").exists()
    size = sum(path.stat().st_size for path in there.rglob("*") if path.is_file() and path.name != "manifest.json")
    (told,) = [
        one["what"]
        for one in desk.run("doctor", "--playbook", "tiny").named("diagnosis")
        if f"as those of run {done.result['run']}" in one["what"]
    ]
    assert f"3 checkpoints at once (all of the run's), {size / 1024:.1f} KiB each" in told


def test_prune_takes_only_runs_that_are_whole_here(desk: Desk) -> None:
    done = desk.deploy()
    assert done.code == 0, done.out + done.err
    run = done.result["run"]
    there = desk.folder / "work/runs" / run
    weights = desk.runs / run / "checkpoints/step-000012/model.safetensors"
    assert desk.run("prune").result["freed_bytes"] == 0
    assert there.exists()
    # flipped: the size alone would not tell
    weights.write_bytes(bytes(255 - byte for byte in weights.read_bytes()))
    kept = desk.run("prune", "--keep-runs", "0")
    assert kept.code == 0, kept.out + kept.err
    assert there.exists()
    assert "not whole on your workstation" in str(kept.named("prune"))
    assert desk.run("collect").code == 0
    shown = desk.type("prune", "--keep-runs", "0", "--dry-run", "--host", "box")
    assert f"run {run}" in shown.err
    assert there.exists()
    gone = desk.run("prune", "--keep-runs", "0")
    assert gone.result["freed_bytes"] > 0
    assert not there.exists()
    assert [item["why"] for item in gone.named("prune") if item["kind"] == "release"] == ["current"]


def test_a_checkpoint_that_is_damaged_on_the_host_is_named_once_all_else_is_here(desk: Desk) -> None:
    run = desk.deploy("--detach").result["run"]
    assert desk.run("wait").code == 0
    there = desk.folder / "work/runs" / run / "out/checkpoints/step-000008/model.safetensors"
    there.write_bytes(bytes(255 - byte for byte in there.read_bytes()))
    done = desk.run("collect")
    assert done.code == 5, done.out + done.err
    assert "step-000008" in done.error["what"]
    assert "damaged" in done.error["what"]
    folder = desk.runs / run
    assert whole(folder) == ["step-000004", "step-000012"]
    assert (folder / "report.md").exists()
    assert not (folder / ".incoming").exists()
    # what is not here does not go there either
    kept = desk.run("prune", "--keep-runs", "0")
    assert "not whole on your workstation" in str(kept.named("prune"))


def test_a_run_that_goes_on_may_be_collected_at_any_moment(desk: Desk) -> None:
    desk.write_playbook("long", training={"steps": 200000, "checkpoint_every": 2000})
    assert desk.deploy("--detach", playbook="long").code == 0
    # its trainer writes at_work.ndjson anew many times while each of these reads it
    for _ in range(8):
        done = desk.run("collect")
        assert done.code == 0, done.out + done.err
    assert desk.run("stop").code == 0
