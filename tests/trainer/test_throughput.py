"""A step's time against the GPU's own history: bands, what is kept, and what is no history."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from trainer.canary.clock import median_step_ms
from trainer.canary.evidence import Outcome
from trainer.canary.gate import gate_settings
from trainer.canary.throughput import LAST, Throughput, judged, read_history
from trainer.canary.timing import Timing, time_steps
from trainer.collector import paused_collector
from trainer.parts import load_parts
from trainer.settings import settings_from_json

pytestmark = pytest.mark.torch


def taking(step_ms: float) -> Timing:
    return Timing(step_ms, 10, 1e3 / step_ms, None, 1.0)


@pytest.mark.parametrize(
    ("step_ms", "outcome"),
    [
        (5.0, Outcome.PASS),
        (10.0, Outcome.PASS),
        (11.7, Outcome.PASS),
        (11.8, Outcome.WARN),
        (16.6, Outcome.WARN),
        (16.7, Outcome.FAIL),
    ],
)
def test_bands(step_ms: float, outcome: Outcome) -> None:
    check = judged("cuda:0", taking(step_ms), [10.0, 10.0, 10.0])
    assert check.outcome is outcome
    assert check.figures["share"] == pytest.approx(10.0 / step_ms)
    assert "10.00 ms, 3 canaries" in check.summary


def test_too_short_a_history_judges_nothing(tmp_path: Path) -> None:
    check = judged("cuda:0", taking(100.0), [10.0, 10.0])
    assert check.outcome is Outcome.NOT_CHECKED
    assert "first sight: 2 kept" in check.summary


def test_the_last_ones_count_and_one_lucky_day_does_not() -> None:
    before = [1.0] * 50
    assert judged("cuda:0", taking(10.0), before + [10.0] * LAST).outcome is Outcome.PASS
    assert judged("cuda:0", taking(10.0), [10.0, 10.0, 1.0]).outcome is Outcome.PASS


def test_a_history_is_one_line_for_each_canary_that_passed(tmp_path: Path) -> None:
    files = (tmp_path / "GPU-a" / "k.ndjson", tmp_path / "GPU-b" / "k.ndjson")
    assert read_history(files[0]) == []
    for step_ms in (10.0, 12.5):
        Throughput(taking(step_ms), files).keep()
    assert read_history(files[0]) == read_history(files[1]) == [10.0, 12.5]
    with files[0].open("a") as file:
        file.write('{"step_ms": "fast"}\n{"step_ms": NaN}\n{"v": 1}\n7\n{"step_ms": 11.0}\n{"step_m')
    assert read_history(files[0]) == [10.0, 12.5, 11.0]


def test_the_slowest_worker_sets_the_pace() -> None:
    assert median_step_ms([[1.0, 1.0, 9.0], [2.0, 2.5, 2.0]]) == 2.0


def test_what_was_timed_is_let_go_though_nobody_collects(make_settings: Any, prepared_folder: Path) -> None:
    settings = settings_from_json(make_settings(prepared=str(prepared_folder), draft_layers=1))
    with paused_collector():
        parts = load_parts(gate_settings(settings))
        timing = time_steps(parts)
        weight = weakref.ref(next(iter(parts.targets.values())).head_weight)
        del parts
        assert weight() is None, "the rehearsal loads it again, and a GPU may not hold it twice"
    assert timing.steps >= 8
    assert timing.samples_per_s == pytest.approx(2e3 / timing.step_ms)
    assert timing.warm_up_s > 0
