"""Life and sickness of a run, told from its metrics and a clock that is never set."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from dflash_ops.agent.watch import NON_FINITE, STALLED, Trouble, Watch


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def metrics(tmp_path: Path) -> Path:
    return tmp_path / "metrics.ndjson"


def add(metrics: Path, text: str) -> None:
    with metrics.open("a") as file:
        file.write(text)


def step(number: int, **values: object) -> str:
    return json.dumps({"v": 1, "kind": "step", "step": number, "loss": 1.5, "grad_norm": 0.1, **values}) + "\n"


def watching(metrics: Path, stall_s: float = 10, first_step_s: float = 100) -> tuple[Watch, Clock]:
    clock = Clock()
    return Watch(metrics, stall_s=stall_s, first_step_s=first_step_s, clock=clock), clock


def stalled(trouble: Trouble | None) -> tuple[int | None, float | None]:
    assert trouble is not None
    assert trouble.kind == STALLED
    return trouble.step, trouble.seconds


def test_before_the_first_step_patience_is_longer(metrics: Path) -> None:
    watch, clock = watching(metrics)
    clock.now += 99
    assert watch.look() is None
    # the first evaluation is a sign of life, and no step
    add(metrics, json.dumps({"kind": "evaluation", "step": 0}) + "\n")
    assert watch.look() is None
    clock.now += 99
    assert watch.look() is None
    clock.now += 1
    trouble = watch.look()
    assert stalled(trouble) == (None, 100)
    assert trouble is not None
    assert "before the first step (first_step_s is 100)" in trouble.what


def test_after_the_last_step_patience_is_longer_again(metrics: Path) -> None:
    clock = Clock()
    watch = Watch(metrics, stall_s=10, first_step_s=100, last_step=8, clock=clock)
    add(metrics, step(7))
    assert watch.look() is None
    clock.now += 9
    add(metrics, step(8))
    clock.now += 99
    assert watch.look() is None
    clock.now += 99
    assert watch.look() is None
    clock.now += 1
    assert stalled(watch.look()) == (8, 100)


def test_every_record_is_life_and_what_is_no_record_is_not(metrics: Path) -> None:
    watch, clock = watching(metrics)
    for text in (step(7), json.dumps({"kind": "checkpoint", "step": 7}) + "\n", step(8)):
        add(metrics, text)
        assert watch.look() is None
        clock.now += 9
    assert watch.look() is None
    # damaged, half, foreign
    for text in (
        '{"kind": "step", "st\n',
        "[1]\n",
        '"step"\n',
        '{"step": 9}\n',
        "\n",
        "[" * 100_000 + "\n",
        step(9)[:-1],
    ):
        add(metrics, text)
    clock.now += 1
    assert stalled(watch.look()) == (8, 10)
    # the half line's end makes it a record
    add(metrics, "\n")
    assert watch.look() is None


def test_zero_is_never(metrics: Path) -> None:
    watch, clock = watching(metrics, stall_s=0, first_step_s=0)
    clock.now += 1e9
    assert watch.look() is None
    add(metrics, step(1))
    assert watch.look() is None
    clock.now += 1e9
    assert watch.look() is None


@pytest.mark.parametrize(
    ("values", "what"),
    [
        ({"loss": math.nan}, "loss is NaN at step 3"),
        ({"loss": math.inf}, "loss is Infinity at step 3"),
        ({"loss": None}, "loss is null at step 3"),
        ({"grad_norm": -math.inf}, "grad_norm is -Infinity at step 3"),
    ],
)
def test_a_loss_that_is_none_is_told_with_its_record(metrics: Path, values: dict[str, object], what: str) -> None:
    watch, _ = watching(metrics)
    workers = [{"worker": 0, "samples": [4, 8]}]
    add(metrics, step(2) + step(3, workers=workers, **values) + step(4))
    trouble = watch.look()
    assert trouble is not None
    assert (trouble.kind, trouble.what, trouble.step) == (NON_FINITE, what, 3)
    assert trouble.record is not None
    assert trouble.record["workers"] == workers
    # strict JSON: other programs than Python read exit.json
    json.dumps(trouble.to_json(), allow_nan=False)


def test_what_is_no_finding(metrics: Path) -> None:
    watch, _ = watching(metrics)
    add(metrics, json.dumps({"kind": "evaluation", "step": 0, "loss": None}) + "\n")
    add(metrics, json.dumps({"kind": "step", "step": 1}) + "\n")
    add(metrics, step(2, loss=0, grad_norm=None, step_time=math.nan) + step(3, loss=10**400))
    assert watch.look() is None


def test_a_replaced_file_is_read_anew_and_a_link_is_not_followed(metrics: Path, tmp_path: Path) -> None:
    watch, _ = watching(metrics)
    add(metrics, step(1) * 5)
    assert watch.look() is None
    metrics.unlink()
    add(metrics, step(2, loss=math.nan))
    assert watch.look() is not None
    other, _ = watching(tmp_path / "link")
    (tmp_path / "link").symlink_to(metrics)
    assert other.look() is None


def test_what_was_at_work_when_it_hung(metrics: Path) -> None:
    begun = [{"worker": 0, "step": 8, "samples": [3, 17]}, {"worker": 1, "step": 8, "samples": [5]}]
    lines = [json.dumps(each).ljust(100) for each in begun]
    # a line that is just being written, and one that is something else
    at_work = metrics.with_name("at_work.ndjson")
    at_work.write_text("\n".join([*lines, '{"worker": 2, "samp', "[]", '{"worker": 3}']))
    watch, clock = watching(metrics)
    add(metrics, step(7))
    assert watch.look() is None
    clock.now += 10
    trouble = watch.look()
    assert trouble is not None and trouble.to_json()["at_work"] == begun


def test_a_trainer_need_not_say_what_is_at_work(metrics: Path) -> None:
    watch, clock = watching(metrics)
    clock.now += 100
    trouble = watch.look()
    assert trouble is not None and trouble.to_json()["at_work"] is None
