"""`prepare`: a playbook's data made by a run of their own, and what of it a deploy finds."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

from tests.agent.client import alive
from tests.commands import Desk, eventually
from tests.deploy.test_deploy import processes_of


def test_in_a_terminal_and_then_a_deploy(desk: Desk) -> None:
    shown = desk.type("prepare", "--host", "box", "--playbook", "tiny")
    assert shown.code == 0, shown.err
    assert "prepares data in " in shown.err
    assert "prepare  done: " in shown.err
    again = desk.run("prepare", "--playbook", "tiny")
    assert (again.code, again.result["run"]) == (0, None)
    assert again.named("prepared")[0]["reused"]
    path = Path(again.result["prepared"])
    assert (path / "rows.ndjson").exists()

    (run,) = desk.run("runs").named("run")
    assert (run["state"], run["prepares"], run["skipped_canary"]) == ("SUCCEEDED", str(path), None)
    (known,) = desk.run("runs", "--all", host=False).named("run")
    # there was none, and nothing says that it passed
    assert (known["run"], known["verdict"]) == (run["run"], None)
    folder = desk.runs / run["run"]
    assert json.loads((folder / "prepare.json").read_text())["rows"] > 0
    report = (folder / "report.md").read_text()
    for words in (f"- prepares: {path}", "- rows: ", "`prepare.json`", "SUCCEEDED"):
        assert words in report

    done = desk.deploy()
    assert done.code == 0, done.out + done.err
    (prepared,) = done.named("prepared")
    assert (prepared["path"], prepared["reused"]) == (str(path), True)


def test_walked_away_from_stopped_killed_and_resumed(desk: Desk) -> None:
    desk.write_playbook("slow", faults=("prepare-waits",))
    begun = desk.run("prepare", "--playbook", "slow", "--detach")
    assert begun.code == 0, begun.out + begun.err
    first = begun.result["run"]
    assert first.split("-")[2:4] == ["slow", "prepare"]
    assert f"dflash-ops tail-logs -f {first}" in begun.named("notice")[-1]["text"]
    with desk.started("tail-logs", "-f", first) as following:
        assert following.until_event("log")["line"] == "half of it is there"
        # whoever needs these data waits for it; the name is told
        refused = desk.deploy(playbook="slow")
        assert (refused.code, first in refused.error["what"]) == (8, True)
        assert desk.run("status").result["state"] == "RUNNING"
        assert "  half of it is there" in desk.type("status", "--host", "box").err
        stopped = desk.run("stop")
        assert (stopped.result["state"], stopped.result["remaining"]) == ("STOPPED", [])
        assert "what it has prepared stays" in stopped.named("phase")[0]["what"]
        following.rest()

    second = desk.run("resume", "--detach")
    assert second.code == 0, second.out + second.err
    assert second.result["parent"] == first
    run = second.result["run"]
    state = json.loads((desk.folder / "work" / "runs" / run / "state.json").read_text())
    for process in (state["supervisor"], state["job"]):
        os.kill(process["pid"], signal.SIGKILL)
    eventually(lambda: not alive(state["supervisor"]["pid"]) and processes_of(run) == [])
    assert desk.run("status").result["state"] == "LOST"

    (desk.folder / "work" / "cache" / "go").touch()
    refused = desk.run("resume", "--again")
    assert (refused.code, refused.error["kind"]) == (2, "usage")
    third = desk.run("resume")
    assert third.code == 0, third.out + third.err
    assert not third.named("canary")
    assert (third.result["parent"], third.result["state"]) == (run, "SUCCEEDED")
    path = third.result["prepared"]
    assert third.named("prepared")[0]["path"] == path
    assert f"- goes on with: {run}, from {path}\n" in (Path(third.result["folder"]) / "report.md").read_text()
    # nothing is left to do
    done = desk.run("resume")
    assert (done.code, done.result["run"], done.result["prepared"]) == (0, None, path)
    assert desk.run("wait").result["state"] == "SUCCEEDED"
    # the data are those that nobody disturbed
    undisturbed = desk.deploy()
    assert undisturbed.named("prepared")[0]["path"] == path


def test_what_needs_no_preparation_launches_nothing(desk: Desk, tmp_path: Path) -> None:
    rows = tmp_path / "rows"
    rows.mkdir()
    (rows / "rows.ndjson").write_text('{"input_ids": [4, 5, 6, 7], "loss_mask": [0, 1, 1, 1]}\n')
    desk.write_playbook(training={"data": str(rows), "prompts": None, "evaluation_prompts": 0})
    done = desk.run("prepare", "--playbook", "tiny")
    assert done.code == 0, done.out + done.err
    assert (done.result["run"], done.result["prepared"]) == (None, None)
    assert "nothing was launched" in done.named("notice")[-1]["text"]
    assert not list((desk.folder / "work" / "runs").iterdir())


def test_where_an_endpoint_answers_no_gpu_is_needed_and_its_deploys_find_the_data(desk: Desk) -> None:
    """No GPU is here, and the playbook demands one. The tiny trainer asks no endpoint; which one is none of its key."""
    by_endpoint = ("--set", "engine=openai", "--set", "endpoint=http://127.0.0.1:1/v1")
    cuda = ("--set", "require_cuda=true", "--set", "drafter_devices=[cuda:0, cuda:1]", "--set", "gpus=[0]")
    refused = desk.run("prepare", "--playbook", "tiny", *cuda)
    assert (refused.code, "require_cuda" in refused.error["fix"]) == (5, True)
    made = desk.run("prepare", "--playbook", "tiny", *cuda, *by_endpoint)
    assert made.code == 0, made.out
    assert made.result["state"] == "SUCCEEDED"
    disk = [one["what"] for one in made.named("diagnosis") if "known after a first run" in one["what"]]
    assert disk == ["what prepared data of this target take is known after a first run here"]
    done = desk.deploy(*by_endpoint, "--detach")
    assert done.code == 0, done.out
    assert [(one["path"], one["reused"]) for one in done.named("prepared")] == [(made.result["prepared"], True)]
    # the next that prepares knows what it will take
    rows = json.loads((Path(made.result["prepared"]) / "prepare.json").read_text())["rows"]
    more = desk.run("prepare", "--playbook", "tiny", *cuda, *by_endpoint, "--set", "prompt_count=63")
    assert more.code == 0, more.out
    (disk,) = [one["what"] for one in more.named("diagnosis") if "to prepare, as" in one["what"]]
    assert disk.startswith("data of 63 rows") and f"for {rows}" in disk and made.result["prepared"] in disk
