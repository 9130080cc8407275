"""Strategy `auto`: measured on first sight, kept on the host, part of what a verdict is bound to."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.commands import Desk, eventually

AUTO = {"strategy": "auto", "canary_timeout_s": 60}


def kept(desk: Desk) -> list[Path]:
    return sorted((desk.folder / "work" / "cache" / "tuning").glob("*.json"))


def test_a_deploy_measures_what_the_host_has_not_seen_and_then_no_more(desk: Desk) -> None:
    desk.write_playbook(workload=AUTO)
    first = desk.deploy()
    assert first.code == 0, first.out + first.err
    order = [event["event"] for event in first.events if event["event"] in ("prepared", "tuning", "tuned", "verdict")]
    assert order == ["prepared", "tuning", "tuned", "verdict"]
    (tuned,) = first.named("tuned")
    (table,) = kept(desk)
    assert tuned["table"] == json.loads(table.read_text())
    rows = {row["strategy"]: row["outcome"] for row in tuned["table"]["strategies"]}
    others = ("default", "reduce-overhead", "reduce-overhead-trees", "whole-step")
    assert rows == {"eager": "right", **dict.fromkeys(others, "not_available")}

    folder = Path(first.result["folder"])
    assert json.loads((folder / "tuning.json").read_text()) == tuned["table"]
    verdict = json.loads((folder / "verdict.json").read_text())
    assert verdict["binding"]["tuning"] == {table.stem: "eager"}
    assert verdict["evidence"]["tuning"] == tuned["table"]
    report = (folder / "report.md").read_text()
    assert "| eager | right | " in report and "the fastest that is right" in report
    metrics = [json.loads(line) for line in (folder / "metrics.ndjson").read_text().splitlines()]
    assert [record["strategy"] for record in metrics if record["kind"] == "strategy"] == ["eager"]

    second = desk.deploy()
    assert second.code == 0, second.out + second.err
    assert not second.named("tuning")
    assert second.named("verdict")[0]["reused"]


def test_another_choice_of_auto_voids_the_verdict_and_the_gate_knows(desk: Desk) -> None:
    desk.write_playbook(workload=AUTO)
    assert desk.run("canary", "--playbook", "tiny").code == 0
    (table,) = kept(desk)
    table.write_text(json.dumps({**json.loads(table.read_text()), "fastest": "default"}))
    again = desk.run("canary", "--playbook", "tiny")
    assert again.code == 0, again.out
    assert not again.named("verdict")[0]["reused"]
    assert "another choice of strategy `auto`" in again.named("canary")[0]["why"]
    # a table of other shapes is nothing to it
    other = json.loads(table.read_text())
    other["shapes"]["drafter_threads"] = 5
    table.with_name(f"{'f' * 64}.json").write_text(json.dumps(other))
    assert desk.run("canary", "--playbook", "tiny").named("verdict")[0]["reused"]


def test_tuning_that_is_asked_for_shows_its_table_and_proves_again(desk: Desk) -> None:
    desk.write_playbook(workload={"canary_timeout_s": 60})
    assert desk.run("canary", "--playbook", "tiny").code == 0
    shown = desk.type("canary", "--host", "box", "--playbook", "tiny", "--tune")
    assert shown.code == 0, shown.err
    assert "samples/s" in shown.err and "not available" in shown.err
    assert "`auto` is eager" in shown.err
    assert "the strategies were measured anew" in shown.err
    assert len(kept(desk)) == 1


def test_where_no_strategy_is_right_nothing_is_launched(desk: Desk) -> None:
    desk.write_playbook(faults=("wrong-gradient-one-worker",), workload=AUTO)
    done = desk.deploy()
    assert done.code == 6, done.out + done.err
    assert done.error["kind"] == "tuning"
    (tuned,) = done.named("tuned")
    assert tuned["table"]["fastest"] is None
    (wrong,) = (row for row in tuned["table"]["strategies"] if row["outcome"] == "wrong")
    assert wrong["strategy"] == "eager" and "worst" in wrong["why"]
    assert not done.named("verdict")
    assert not done.named("launched")
    assert kept(desk) == []


def test_a_strategy_that_hangs_is_a_row_by_the_trainers_own_watchdog(desk: Desk) -> None:
    desk.write_playbook(faults=("worker-hangs",), workload={**AUTO, "canary_timeout_s": 5})
    done = desk.deploy()
    assert done.code == 6, done.out + done.err
    (tuned,) = done.named("tuned")
    assert tuned["table"]["strategies"][0]["outcome"] == "failed"
    assert "5 s" in tuned["table"]["strategies"][0]["why"]


def test_interrupting_a_tuning_leaves_nothing(desk: Desk) -> None:
    desk.write_playbook("hanging", faults=("worker-hangs",), workload={**AUTO, "canary_timeout_s": 200})
    with desk.started("canary", "--playbook", "hanging") as process:
        process.until_event("tuning")
        process.kill(signal.SIGINT)
        process.rest()
        assert process.code == 130
    eventually(lambda: not (desk.folder / "work" / "lock").exists())
    assert kept(desk) == []
    desk.write_playbook(workload=AUTO)
    assert desk.deploy().code == 0


@pytest.mark.parametrize("table", ["[]", '{"fastest": 7, "shapes": []}', "no json"])
def test_a_damaged_table_is_measured_again(desk: Desk, table: str) -> None:
    desk.write_playbook(workload=AUTO)
    assert desk.run("canary", "--playbook", "tiny").code == 0
    (path,) = kept(desk)
    path.write_text(table)
    again = desk.run("canary", "--playbook", "tiny")
    assert again.code == 0, again.out + again.err
    assert again.named("tuned")
