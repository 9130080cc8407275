"""What TensorBoard itself reads from the event files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from trainer.metrics import Metrics
from trainer.settings import settings_from_json
from trainer.train_dflash_pipeline import run

pytestmark = pytest.mark.torch

event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")

STEP = {
    "loss": 2.5,
    "first_slot_accuracy": 0.25,
    "learning_rate": 6e-4,
    "grad_norm": 1.5,
    "queue_depth": 3,
    "samples": 8,
    "workers": [{"worker": 0, "samples": [1, 2], "wait_s": 0.1}],
    "pipeline": {
        "seconds": 0.5,
        "samples_per_s": 16.0,
        "target_tokens_per_s": 2048.0,
        "drafter_wait": 0.125,
        "drafter_busy": 0.75,
        "target_wait": 0.5,
        "target_busy": 0.25,
    },
}


def read(folder: Path) -> dict[str, dict[int, float]]:
    """Values by tag and step; a step that is shown twice is none."""
    found = event_accumulator.EventAccumulator(str(folder), size_guidance={event_accumulator.SCALARS: 0}).Reload()
    shown = {tag: [(each.step, each.value) for each in found.Scalars(tag)] for tag in found.Tags()["scalars"]}
    for tag, values in shown.items():
        assert len({step for step, _ in values}) == len(values), f"{tag} shows a step twice: {values}"
    return {tag: dict(values) for tag, values in shown.items()}


def test_every_figure_of_a_record_and_nothing_is_lost_by_a_kill(tmp_path: Path) -> None:
    with Metrics(tmp_path) as metrics:
        metrics.write("strategy", 0, strategy="eager")
        metrics.write("evaluation", 0, when="start", loss=None, first_slot_acceptance=0.5, tau=1.75, lossless=True)
        for step in (1, 300, 100_000):
            metrics.write("step", step, **{**STEP, "loss": step / 4})
        # read while it is open: no call that a kill could prevent is missing
        train, evaluation = read(tmp_path / "tensorboard/train"), read(tmp_path / "tensorboard/evaluation")
    assert train == {
        "loss": {1: 0.25, 300: 75.0, 100_000: 25_000.0},
        **{
            tag: dict.fromkeys((1, 300, 100_000), value)
            for tag, value in {
                "first_slot_accuracy": 0.25,
                "learning_rate": pytest.approx(6e-4),
                "grad_norm": 1.5,
                "queue_depth": 3.0,
                **{f"pipeline/{name}": value for name, value in STEP["pipeline"].items() if name != "seconds"},
            }.items()
        },
    }
    assert evaluation == {"first_slot_acceptance": {0: 0.5}, "tau": {0: 1.75}}
    found = event_accumulator.EventAccumulator(str(tmp_path / "tensorboard/train")).Reload()
    lines = [json.loads(line) for line in (tmp_path / "metrics.ndjson").read_text().splitlines()]
    assert [each.wall_time for each in found.Scalars("loss")] == [
        each["time"] for each in lines if each["kind"] == "step"
    ]


def test_a_run_that_goes_on_shows_each_step_once(tmp_path: Path, make_settings: Any, prepared_folder: Path) -> None:
    def settings(**more: Any) -> Any:
        given = {"prepared": str(prepared_folder), "steps": 9, "checkpoint_every": 4, "evaluate_every": 2}
        return settings_from_json(make_settings(**given, **more))

    def stops() -> Any:
        asked = iter([False] * 7)
        return lambda: next(asked, True)

    out = tmp_path / "out"
    out.mkdir()
    first = run(settings(), out, stop=stops())
    assert first.outcome == "stopped" and 4 < first.steps < 9
    # as a kill leaves it: steps and evaluations later than the last checkpoint
    shutil.rmtree(first.checkpoint)
    run(settings(resume_from=str(out / "checkpoints/step-000004")), out)
    records = [json.loads(line) for line in (out / "metrics.ndjson").read_text().splitlines()]
    steps = [each for each in records if each["kind"] == "step"]
    judged = [each for each in records if each["kind"] == "evaluation"]
    assert len(steps) > 9 and len(judged) > 6, "the second attempt took no step again"
    train, evaluation = read(out / "tensorboard/train"), read(out / "tensorboard/evaluation")
    # the later record of a step is the one that counts
    for tag in ("loss", "learning_rate"):
        assert train[tag] == pytest.approx({each["step"]: each[tag] for each in steps})
    assert list(train["loss"]) == list(range(1, 10))
    assert train["pipeline/samples_per_s"].keys() == train["loss"].keys()
    assert evaluation["tau"] == pytest.approx({each["step"]: each["tau"] for each in judged})
    assert list(evaluation["tau"]) == [0, 2, 4, 6, 8, 9]


def test_a_folder_of_an_earlier_attempt_keeps_what_it_has(tmp_path: Path) -> None:
    for attempt, first in enumerate((1, 3, 2)):
        with Metrics(tmp_path) as metrics:
            for step in range(first, first + 4):
                metrics.write("step", step, loss=float(10 * attempt + step))
    assert read(tmp_path / "tensorboard/train") == {"loss": {1: 1.0, 2: 22.0, 3: 23.0, 4: 24.0, 5: 25.0}}
