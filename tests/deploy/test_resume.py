"""`resume`: a run that has ended goes on as a child of it, through the stages of a deploy."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

from dflash_ops.agent.files import digest_of, remove_tree
from dflash_ops.agent.processes import Mark
from tests.agent.client import alive
from tests.commands import Desk, eventually

UNPROVEN = ("--skip-canary", "--reason", "resuming is tested here")


def steps_of(folder: Path) -> list[int]:
    records = [json.loads(line) for line in (folder / "metrics.ndjson").read_text().splitlines()]
    return [record["step"] for record in records if record["kind"] == "step"]


def host_folder(desk: Desk, run: str) -> Path:
    return desk.folder / "work" / "runs" / run


def edit(path: Path, **changes: Any) -> dict[str, Any]:
    value = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps(value))
    return value


def reboot(desk: Desk, run: str) -> None:
    """What a reboot leaves behind: no process, and the records of another boot."""
    work = desk.folder / "work"
    state = json.loads((host_folder(desk, run) / "state.json").read_text())
    for process in (state["supervisor"], state["job"]):
        os.kill(process["pid"], signal.SIGKILL)
    # it may be about to write its state
    eventually(lambda: not alive(state["supervisor"]["pid"]))
    assert Mark.of_run(work, run).kill(patience_s=120) == []
    edit(host_folder(desk, run) / "state.json", boot_id="the boot before")
    for path in (work / "verdicts").glob("*.json"):
        verdict = json.loads(path.read_text())
        verdict["binding"]["boot_id"] = "the boot before"
        verdict["digest"] = digest_of(verdict["binding"])
        path.unlink()
        path.with_name(f"{verdict['digest']}.json").write_text(json.dumps(verdict))


def test_after_a_reboot_without_the_playbook_and_then_with_more_steps(desk: Desk) -> None:
    desk.write_playbook("slow", faults=("slow-steps",), training={"steps": 5000, "checkpoint_every": 1})
    first = desk.deploy("--detach", playbook="slow").result["run"]
    waited = desk.run("wait", "--timeout", "1")
    assert (waited.code, waited.result["run"]) == (10, first)
    checkpoints = host_folder(desk, first) / "out" / "checkpoints"
    eventually(lambda: len(list(checkpoints.glob("step-??????/manifest.json"))) >= 3)
    reboot(desk, first)
    (desk.folder / "playbooks" / "slow.yaml").unlink()
    whole = sorted(path.parent for path in checkpoints.glob("step-??????/manifest.json"))
    weights = whole[-1] / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"?")
    step = int(whole[-2].name.removeprefix("step-"))

    done = desk.run("resume", first, "--set", f"steps={step + 1}")
    assert done.code == 0, done.out + done.err
    (damaged,) = done.named("damaged")
    assert damaged["path"] == str(whole[-1])
    assert "model.safetensors" in damaged["why"]
    assert done.named("resuming")[0]["state"] == "LOST"
    assert not done.named("built")
    # the canary's verdict is of the boot before
    assert "an earlier boot" in done.named("canary")[0]["why"]
    assert not done.named("verdict")[0]["reused"]
    second, folder = done.result["run"], Path(done.result["folder"])
    assert (done.result["parent"], done.result["state"]) == (first, "SUCCEEDED")
    assert steps_of(folder) == [step + 1]
    assert f"- goes on with: {first}, from {whole[-2]}\n" in (folder / "report.md").read_text()
    assert json.loads((folder / "record.json").read_text())["parent"] == first

    # the latest, which has succeeded
    more = desk.run("resume", "--set", f"steps={step + 3}")
    assert more.code == 0, more.out + more.err
    assert more.named("verdict")[0]["reused"]
    assert more.result["parent"] == second
    assert steps_of(Path(more.result["folder"])) == [step + 2, step + 3]
    shown = desk.type("runs", "--host", "box").err
    for words in (f"goes on with {first}", f"went on as {second}", f"goes on with {second}"):
        assert words in shown


def test_after_a_crash_with_a_newer_release(desk: Desk) -> None:
    desk.write_playbook(faults=("fails-at-step-5",))
    failed = desk.deploy(*UNPROVEN)
    assert failed.code == 8
    remove_tree(desk.folder / "work" / "releases" / failed.result["release"])
    gone = desk.run("resume")
    assert gone.code == 2
    assert f"dflash-ops resume {failed.result['run']} --release" in gone.error["fix"]
    desk.write_playbook(workload={"drafter_threads": 3})
    done = desk.run("resume", "--release", "--playbook", "tiny")
    assert done.code == 0, done.out + done.err
    assert done.result["release"] == done.named("built")[0]["release"] != failed.result["release"]
    # the settings are the run's own, and a skipped canary is not skipped again
    settings = json.loads((Path(done.result["folder"]) / "settings.json").read_text())
    assert settings["workload"]["drafter_threads"] == 2
    assert done.result["verdict"] == "pass"
    assert steps_of(Path(done.result["folder"])) == list(range(5, 13))
