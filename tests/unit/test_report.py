from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dflash_ops.deploy.pipeline import bottleneck
from dflash_ops.deploy.report import write_report

STEP = {"kind": "step", "step": 3, "loss": 1.5, "first_slot_accuracy": 0.25, "learning_rate": 1e-3, "grad_norm": 2.0}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "record.json").write_text(json.dumps({"run": "r", "host": "box"}))
    (tmp_path / "status.json").write_text(json.dumps({"state": "STOPPED", "started": 0, "exit": {"code": 20}}))
    (tmp_path / "metrics.ndjson").write_text(json.dumps(STEP) + "\n")
    return tmp_path


def report(folder: Path) -> str:
    return write_report(folder).read_text()


def test_what_is_no_text_does_not_stop_it(folder: Path) -> None:
    (folder / "run.json").write_text('{"skipped_canary": "\\ud800x"}')
    assert "**The canary was skipped:** ?x" in report(folder)


def test_tells_what_there_is(folder: Path) -> None:
    (folder / "settings.json").write_text(json.dumps({"workload": {"strategy": "eager"}, "training": {"steps": 4}}))
    text = report(folder)
    for words in (
        "# Run r",
        "STOPPED",
        "1970-01-01 00:00:00 UTC",
        "code 20",
        '`strategy="eager"`',
        "`steps=4`",
        "| 3 | 1.5000",
    ):
        assert words in text


def test_a_stopped_run_shows_what_was_measured_before(folder: Path) -> None:
    before = {"loss": 9.0, "first_slot_acceptance": 0.1, "tau": 1.0}
    (folder / "result.json").write_text(json.dumps({"steps": 3, "before": before, "after": None}))
    assert "| held-out loss (nats) | 9.000 |  |" in report(folder)


def test_says_which_side_is_the_bottleneck(folder: Path) -> None:
    measured = {"samples_per_s": 2.0, "target_tokens_per_s": 6000, "drafter_wait": 0.8, "target_wait": 0.0}
    short = {**STEP, "pipeline": {**measured, "seconds": 1}}
    long = {**STEP, "pipeline": {**measured, "seconds": 3, "drafter_wait": 0.4}}
    broken = [{**STEP, "pipeline": each} for each in (None, [], {}, {**measured, "seconds": "1"})]
    (folder / "metrics.ndjson").write_text("".join(json.dumps(each) + "\n" for each in (short, long, *broken)))
    assert "drafters wait 50% of the time: the target is the bottleneck (6,000 tokens/s)" in report(folder)


@pytest.mark.parametrize(
    ("drafters", "targets", "words"),
    [
        (0.6, 0.2, "the target is the bottleneck"),
        (0.0, 0.5, "the drafters are the bottleneck"),
        (0.09, 0.0, "neither holds the other up"),
    ],
)
def test_the_bottleneck_in_words(drafters: float, targets: float, words: str) -> None:
    figures = {"seconds": 2, "samples_per_s": 1, "target_tokens_per_s": 1}
    told = bottleneck([{"pipeline": {**figures, "drafter_wait": drafters, "target_wait": targets}}])
    assert told is not None and words in told
    assert bottleneck([{"loss": 1.0}]) is None


@pytest.mark.parametrize(
    "result", ["{", "[]", "{}", '{"before": 3, "after": []}', '{"before": {"loss": null}, "steps": 1}']
)
def test_damaged_files_never_stop_a_report(folder: Path, result: str) -> None:
    (folder / "result.json").write_text(result)
    (folder / "verdict.json").write_bytes(b"\xff\xfe")
    broken: list[Any] = [{**STEP, "loss": None}, [], "x"]
    lines = b"\n".join([b"\xff{", b'{"kind": "st', *(json.dumps(each).encode() for each in broken)])
    (folder / "metrics.ndjson").write_bytes(lines)
    assert "| 3 |  | 0.250" in report(folder)


@pytest.mark.parametrize("name", ["run", "settings", "verdict", "prepare", "result"])
@pytest.mark.parametrize(
    "value",
    [
        {"v": 99},
        {"outcome": {}, "evidence": 3, "binding": []},
        {"outcome": "pass", "evidence": {"checks": [1, {}], "tuning": []}},
        {"packages": [1], "python_version": {}, "assets": {"a": 1}, "parent": "p", "skipped_canary": []},
        {"workload": 3, "training": 4},
        {"before": {"loss": "x"}, "after": 1, "steps": [], "checkpoint": 5},
    ],
)
def test_what_a_host_wrote_may_be_anything(folder: Path, name: str, value: dict[str, Any]) -> None:
    (folder / f"{name}.json").write_text(json.dumps(value))
    text = report(folder)
    assert "# Run r" in text
    # and the rest is told
    assert "| 3 | 1.5000" in text
    assert "- `metrics.ndjson`" in text


def test_a_damaged_part_is_named(folder: Path) -> None:
    (folder / "verdict.json").write_text('{"v": 99}')
    assert "(`verdict.json` is not what it should be, so that this part is missing.)" in report(folder)


def test_what_was_prepared_is_told_in_the_trainers_words(tmp_path: Path) -> None:
    bad = {"too_long": {"count": 2, "lines": [18, 21]}}
    prepared = {"contract": 1, "key": "ab" * 32, "rows": 30, "bad": bad, "shortened": [], "rest": list(range(1000))}
    (tmp_path / "prepare.json").write_text(json.dumps(prepared))
    report = write_report(tmp_path).read_text()
    section = report.partition("## Data\n\n")[2].partition("\n\n")[0].splitlines()
    assert section == [
        "- rows: 30",
        '- bad: {"too_long": {"count": 2, "lines": [18, 21]}}',
        "- rest: see prepare.json",
    ]
