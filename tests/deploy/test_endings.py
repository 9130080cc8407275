"""A run that its host ended: what a person reads, and where."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.commands import Desk


@pytest.mark.parametrize(
    ("fault", "kind", "words", "following"),
    [
        ("hangs-at-step-5", "stalled", "after step 4 (stall_s is 6)", "the stacks of its threads end its log"),
        ("records-nan-at-step-5", "non_finite", "loss is NaN at step 5", "from before step 5"),
    ],
)
def test_why_it_was_ended_is_told_everywhere(desk: Desk, fault: str, kind: str, words: str, following: str) -> None:
    desk.write_playbook(faults=(fault,), workload={"rehearsal_steps": 2}, run={"stall_s": 6, "grace_s": 1})
    done = desk.deploy()
    assert done.code == 8, done.out + done.err
    assert words in done.error["what"]
    assert following in done.error["fix"]
    (ended,) = done.named("ended")
    assert (ended["state"], ended["exit"]["reason"]["kind"]) == ("FAILED", kind)
    folder = desk.runs / done.result["run"]
    report = (folder / "report.md").read_text()
    if kind == "non_finite":
        assert f"dflash-ops resume {done.result['run']}` goes on from step-000004" in done.error["fix"]
        (collected,) = done.named("collected")
        first, *rest = collected["checkpoints"]
        # it makes many steps more before its host sees it
        assert (Path(first).name, rest) == ("step-000004", collected["doubtful"])
        assert report.count("its weights may be no numbers") == len(rest)
    assert words in report
    assert json.loads((folder / "exit.json").read_text())["reason"]["kind"] == kind
    if kind == "stalled":
        assert any("in compute" in line for line in done.log), "the stack of the worker that hangs"
        at_work = ended["exit"]["reason"]["at_work"]
        assert [(each["worker"], each["step"]) for each in at_work] == [(0, 5), (1, 5)]
        samples = ", ".join(map(str, at_work[0]["samples"]))
        assert f"; the samples at work, by worker: 0: {samples}; 1: " in done.error["fix"]
        assert json.loads(report.split("```json\n")[1].split("```")[0]) == at_work
    else:
        record = ended["exit"]["reason"]["record"]
        assert [worker["worker"] for worker in record["workers"]] == [0, 1]
        samples = ", ".join(map(str, record["workers"][0]["samples"]))
        assert f"by worker: 0: {samples}; 1: " in done.error["fix"]
        assert json.loads(report.split("```json\n")[1].split("```")[0]) == record
    shown = desk.type("status", "--host", "box")
    assert words in shown.err
    assert following in shown.err


def test_what_the_trainer_refused_in_the_canary_or_in_the_run_is_told(desk: Desk) -> None:
    assert desk.deploy().code == 0
    (rows,) = (desk.folder / "work" / "cache" / "prepared").glob("*/rows.ndjson")
    # check sees that data were made, not that they are whole
    rows.unlink()
    refused = desk.deploy("--again")
    assert (refused.code, refused.error["kind"]) == (2, "refused")
    assert refused.error["what"] == "no rows here"
    assert str(rows) in refused.error["where"]
    assert refused.error["fix"] == "give a folder with rows.ndjson"
    assert (refused.result["verdict"], refused.result["run"], refused.named("verdict")) == (None, None, [])
    shown = desk.type("deploy", "--host", "box", "--playbook", "tiny", "--again")
    assert shown.code == 2
    assert "no rows here" in shown.err.split("error ")[1]

    ended = desk.deploy("--skip-canary", "--reason", "to see the run refuse")
    assert ended.code == 8
    assert f"the trainer refused: no rows here (prepared: {rows})" in ended.error["what"]
    assert ended.error["fix"].startswith("give a folder with rows.ndjson; its log")
    report = (desk.runs / ended.result["run"] / "report.md").read_text()
    assert "- refused: the trainer refused: no rows here" in report
