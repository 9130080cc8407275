"""`--restart`: whoever follows a run that its host starts again goes along, and reads every line once."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

from tests.commands import Desk, eventually

UNPROVEN = ("--skip-canary", "--reason", "restarting is tested here")


def lines_of(events: list[dict[str, Any]]) -> list[str]:
    return [event["line"] for event in events if event["event"] == "log" and event["source"] == "run"]


def log_of(folder: Path) -> list[str]:
    return [line for path in sorted((folder / "log").glob("*.log")) for line in path.read_text().splitlines()]


def checkpoints(folder: Path) -> list[Path]:
    return list((folder / "out" / "checkpoints").glob("step-??????/manifest.json"))


def test_whoever_follows_goes_along(desk: Desk) -> None:
    run_settings = {"restart_backoff_s": 0.1}
    desk.write_playbook(
        "slow", faults=("slow-steps",), training={"steps": 5000, "checkpoint_every": 1}, run=run_settings
    )
    with desk.started("deploy", "--playbook", "slow", "--restart", "1", *UNPROVEN) as deploy:
        run = deploy.until_event("launched")["run"]
        parent = desk.folder / "work" / "runs" / run
        with (
            desk.started("tail-logs", "-f", run) as tail,
            desk.started("wait", run) as waiting,
            desk.started("collect", "-f", run) as collecting,
        ):
            collecting.until_event("checkpoint")
            eventually(lambda: bool(checkpoints(parent)))
            os.kill(json.loads((parent / "state.json").read_text())["job"]["pid"], signal.SIGKILL)
            eventually(lambda: started_again(parent))
            child = json.loads((parent / "next.json").read_text())["run"]
            eventually(lambda: bool(checkpoints(parent.with_name(child))))
            # by the first name: what it has become is stopped, and nothing is started again
            stopped = desk.run("stop", run)
            assert (stopped.code, stopped.result["run"], stopped.result["state"]) == (0, child, "STOPPED")
            seen = {"deploy": deploy.rest(), "tail": tail.rest(), "wait": waiting.rest(), "collect": collecting.rest()}
    for name, events in seen.items():
        ends = [(event["run"], event["state"]) for event in events if event["event"] == "ended"]
        assert ends == [(run, "FAILED"), (child, "STOPPED")], name
        assert [event["child"] for event in events if event["event"] == "restarted"] == [child], name
        assert (events[-1]["exit"], events[-1]["run"], events[-1]["state"]) == (0, child, "STOPPED"), name
    log = [*log_of(desk.runs / run), *log_of(desk.runs / child)]
    assert lines_of(seen["deploy"]) == lines_of(seen["tail"]) == log
    assert lines_of(seen["wait"]) == []
    assert f"- went on as: {child}\n" in (desk.runs / run / "report.md").read_text()
    report = (desk.runs / child / "report.md").read_text()
    assert f"- goes on with: {run}, from {parent}/out/checkpoints/step-" in report
    assert "restarting is tested here" in report


def started_again(folder: Path) -> bool:
    return (folder / "exit.json").exists() and '"started"' in (folder / "next.json").read_text()


def test_why_it_was_not_started_again_is_said(desk: Desk) -> None:
    desk.write_playbook(faults=("fails-at-step-5",), run={"restart_backoff_s": 0})
    done = desk.deploy(*UNPROVEN, "--restart", "1")
    assert (done.code, done.result["state"]) == (8, "FAILED")
    first, second = done.named("ended")
    assert done.result["run"] == second["run"] != first["run"]
    assert "all 1 restarts are used up" in done.named("not_restarted")[0]["why"]
    assert len(list((desk.folder / "work" / "runs").iterdir())) == 2
    # whoever waits for it by its first name waits for what it has become
    waited = desk.run("wait", first["run"])
    assert (waited.code, waited.result["run"], waited.result["state"]) == (8, second["run"], "FAILED")
    assert "this run fails at step 5" in "\n".join(waited.error["evidence"])
