"""Continuing equals never having stopped, bit for bit on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer.check import check
from trainer.checkpoint import load_checkpoint, load_resume
from trainer.errors import InputError
from trainer.settings import settings_from_json
from trainer.train_dflash_pipeline import run

pytestmark = pytest.mark.torch

ROOT = Path(__file__).parents[2]


@pytest.fixture
def settings(make_settings: Any, prepared_folder: Path) -> Any:
    def make(**overrides: Any) -> Any:
        return settings_from_json(
            make_settings(**{"prepared": str(prepared_folder), "steps": 9, "checkpoint_every": 4, **overrides})
        )

    return make


def folder(path: Path) -> Path:
    path.mkdir()
    return path


def same(one: Path, other: Path) -> None:
    for load in (lambda path: load_checkpoint(path)[1], lambda path: load_resume(path).tensors):
        first, second = load(one), load(other)
        assert first.keys() == second.keys() and first
        for name in first:
            assert torch.equal(first[name], second[name]), name
    assert load_resume(one).state == load_resume(other).state


def losses(out: Path) -> dict[int, float]:
    lines = [json.loads(each) for each in (out / "metrics.ndjson").read_text().splitlines()]
    return {each["step"]: each["loss"] for each in lines if each["kind"] == "step"}


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"dtype": "bfloat16", "accumulation": 2, "target_workers": 2},
        {"dtype": "bfloat16", "master_weights": "none"},
    ],
)
def test_resumed_equals_uninterrupted(tmp_path: Path, settings: Any, overrides: dict[str, Any]) -> None:
    whole = run(settings(**overrides), folder(tmp_path / "whole"), evaluate=False)
    halfway = whole.checkpoint.parent / "step-000004"
    rest = run(settings(resume_from=str(halfway), **overrides), folder(tmp_path / "rest"), evaluate=False)
    assert rest.steps == 9
    same(whole.checkpoint, rest.checkpoint)
    before, after = losses(tmp_path / "whole"), losses(tmp_path / "rest")
    assert after == {step: loss for step, loss in before.items() if step > 4}


def test_stopped_and_resumed_in_the_same_folder(tmp_path: Path, settings: Any) -> None:
    whole = run(settings(), folder(tmp_path / "whole"), evaluate=False)
    asked = iter([False] * 3 + [True] * 20)
    out = folder(tmp_path / "out")
    first = run(settings(), out, evaluate=False, stop=lambda: next(asked))
    assert first.outcome == "stopped" and 0 < first.steps < 9
    second = run(settings(resume_from=str(first.checkpoint)), out, evaluate=False)
    same(whole.checkpoint, second.checkpoint)
    assert losses(out) == losses(tmp_path / "whole")


def test_stopped_before_the_first_step(tmp_path: Path, settings: Any) -> None:
    whole = run(settings(), folder(tmp_path / "whole"), evaluate=False)
    first = run(settings(), folder(tmp_path / "out"), evaluate=False, stop=lambda: True)
    assert (first.outcome, first.steps) == ("stopped", 0)
    second = run(settings(resume_from=str(first.checkpoint)), folder(tmp_path / "rest"), evaluate=False)
    same(whole.checkpoint, second.checkpoint)


@pytest.mark.slow
def test_killed_and_resumed(tmp_path: Path, make_settings: Any, settings: Any, prepared_folder: Path) -> None:
    whole = run(settings(), folder(tmp_path / "whole"), evaluate=False)
    given = make_settings(prepared=str(prepared_folder), steps=9, checkpoint_every=4, evaluation_prompts=0)
    (tmp_path / "s.json").write_text(json.dumps(given))
    out = tmp_path / "out"
    process = subprocess.Popen(
        [sys.executable, "-m", "trainer", "run", "--settings", str(tmp_path / "s.json"), "--out", str(out)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=ROOT,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if "checkpoint step-000004" in line:
            break
    process.kill()
    process.wait()
    # what a kill in the middle of a write leaves behind
    with (out / "metrics.ndjson").open("a") as stream:
        stream.write('{"v": 1, "kind": "st')
    (out / "checkpoints" / "step-000008.part").mkdir(exist_ok=True)
    done = sorted((out / "checkpoints").glob("step-*[0-9]"))[-1]
    if done.name == "step-000009":
        pytest.fail("the run ended before it was killed")
    rest = run(settings(resume_from=str(done)), out, evaluate=False)
    same(whole.checkpoint, rest.checkpoint)
    whole_lines = [line for line in (out / "metrics.ndjson").read_text().splitlines() if line != '{"v": 1, "kind": "st']
    assert {json.loads(each)["v"] for each in whole_lines} == {1}


def test_resume_refusals(tmp_path: Path, settings: Any) -> None:
    done = run(settings(), folder(tmp_path / "done"), evaluate=False)
    early = str(done.checkpoint.parent / "step-000004")
    with pytest.raises(InputError, match="give more than 9 steps"):
        run(settings(resume_from=str(done.checkpoint)), folder(tmp_path / "a"))
    with pytest.raises(InputError, match="num_hidden_layers 2, the settings give 1"):
        run(settings(resume_from=early, draft_layers=1, target_layers=[1, 2]), folder(tmp_path / "b"))
    with pytest.raises(InputError, match="num_hidden_layers 2, the settings give 1"):
        run(settings(init_from=early, draft_layers=1, target_layers=[1, 2]), folder(tmp_path / "d"))
    with pytest.raises(InputError, match="step-000009, later than step 4"):
        run(settings(resume_from=early), tmp_path / "done")
    with pytest.raises(InputError, match="manifest"):
        run(settings(resume_from=str(tmp_path / "none")), folder(tmp_path / "c"))


@pytest.mark.parametrize("kinds", [("float32", "none"), ("none", "float32")])
def test_a_checkpoint_goes_on_with_the_masters_that_it_has_or_has_not(
    tmp_path: Path, settings: Any, kinds: tuple[str, str]
) -> None:
    mine, other = kinds
    low = {"dtype": "bfloat16", "steps": 4}
    done = run(settings(**low, master_weights=mine), folder(tmp_path / "done"), evaluate=False).checkpoint
    names = load_resume(done).tensors
    assert any(name.startswith("master.") for name in names) == (mine == "float32")
    assert names["exp_avg.fc.weight"].dtype == (torch.float32 if mine == "float32" else torch.bfloat16)
    further = {**low, "steps": 5, "master_weights": other}
    says = "without float32 master weights, this one trains with" if mine == "none" else "this one trains without"
    with pytest.raises(InputError, match=says):
        run(settings(**further, resume_from=str(done)), folder(tmp_path / "a"), evaluate=False)
    # before a canary of minutes as well
    told = check(settings(**further, resume_from=str(done)), folder(tmp_path / "check"))
    assert [problem.where for problem in told if says in problem.what] == ["training.resume_from"]
    assert check(settings(**{**further, "master_weights": mine}, resume_from=str(done)), tmp_path / "check") == []
    # its weights are anybody's
    run(settings(**further, init_from=str(done)), folder(tmp_path / "b"), evaluate=False)


def test_other_data_begins_its_order_anew_and_says_so(
    tmp_path: Path, settings: Any, caplog: pytest.LogCaptureFixture
) -> None:
    done = run(settings(), folder(tmp_path / "done"), evaluate=False)
    early = str(done.checkpoint.parent / "step-000004")
    rest = run(settings(resume_from=early, seed=5), folder(tmp_path / "rest"), evaluate=False)
    assert "resuming is not exact" in caplog.text
    assert load_resume(rest.checkpoint).state["position"] == 10
