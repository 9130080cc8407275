"""Tuning: each strategy proven and timed in processes of its own; a table that is kept, and what `auto` is by it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from trainer.check import check
from trainer.errors import InputError
from trainer.prepare import prepare
from trainer.settings import settings_from_json
from trainer.tune.table import Row, choose, fastest
from trainer.tune.tuner import tune

pytestmark = pytest.mark.torch

ROOT = Path(__file__).parents[2]
FAULTS = Path(__file__).parent / "faults"
Json = dict[str, Any]


def right(strategy: str, step_ms: float, peak_bytes: int | None = None) -> Row:
    return Row(strategy, "right", None, step_ms, 1e3 / step_ms, peak_bytes, 0.1)


def test_the_fastest_is_right_and_of_equals_the_smaller() -> None:
    wrong = Row("default", "wrong", "gradients: off by 1.5")
    assert fastest([wrong, Row("eager", "not_available", "no")]) is None
    assert fastest([right("eager", 5.0), wrong, right("whole-step", 2.0)]) == "whole-step"
    # within 2%: a measurement would turn with the weather
    near = [right("reduce-overhead", 2.0, 1850), right("whole-step", 2.03, 960), right("eager", 2.05, 10)]
    assert fastest(near) == "whole-step"
    # on a CPU nobody counts memory
    assert fastest([right("default", 2.0), right("eager", 1.99)]) == "eager"


@pytest.fixture(scope="module")
def ready(tiny_target: Path, tiny_prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Json]:
    """Settings on prepared data, two drafters, as small as can be; overrides are the workload's."""
    home = tmp_path_factory.mktemp("tune")
    base: Json = {
        "contract": 1,
        "workload": {
            "target": str(tiny_target),
            "mask_token": "<reserved_0>",
            "require_cuda": False,
            "drafter_threads": 2,
            "dtype": "float32",
            "target_dtype": "float32",
            "strategy": "auto",
            "block_size": 4,
            "anchors": 4,
            "buckets": [32],
            "draft_layers": 1,
            "canary_steps": 1,
        },
        "training": {
            "steps": 2,
            "prompts": str(tiny_prompts),
            "prompt_count": 12,
            "answer_tokens": 16,
            "evaluation_prompts": 0,
        },
        "cache": str(home / "cache"),
    }
    folder = home / "prepared"
    folder.mkdir()
    prepare(settings_from_json(base), folder)

    def make(*, cache: str | None = None, learning_rate: float = 1e-3, **changes: Any) -> Json:
        return {
            **base,
            "prepared": str(folder),
            "cache": cache or base["cache"],
            "workload": {**base["workload"], **changes},
            "training": {**base["training"], "learning_rate": learning_rate},
        }

    return make


def asked(settings: Json, out: Path) -> Json | None:
    """What `check.json` says of tuning."""
    out.mkdir()
    assert check(settings_from_json(settings), out) == []
    found: Json | None = json.loads((out / "check.json").read_text())["tune"]
    return found


@pytest.mark.compiles
@pytest.mark.slow
def test_two_strategies_are_proven_and_timed_and_auto_takes_the_faster(
    ready: Callable[..., Json], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = asked(ready(), tmp_path / "before")
    assert wanted is not None
    with pytest.raises(InputError, match="python -m trainer tune"):
        choose(settings_from_json(ready()))

    file, out = tmp_path / "settings.json", tmp_path / "tuned"
    file.write_text(json.dumps(ready()))
    out.mkdir()
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    assert tune(settings_from_json(ready()), file, out, strategies=("eager", "default")) == 0

    table = json.loads((out / "tuning.json").read_text())
    rows = {row["strategy"]: row for row in table["strategies"]}
    assert list(rows) == ["eager", "default"]
    for row in rows.values():
        assert (row["outcome"], row["why"], row["peak_bytes"]) == ("right", None, None)
        assert row["step_ms"] > 0
        # two workers, one row each
        assert row["samples_per_s"] == pytest.approx(2e3 / row["step_ms"], rel=1e-3)
    assert rows["default"]["warm_up_s"] > rows["eager"]["warm_up_s"] > 0
    assert table["key"] == wanted["key"]
    assert json.loads((Path(ready()["cache"]) / "tuning" / f"{table['key']}.json").read_text()) == table

    assert asked(ready(learning_rate=0.5), tmp_path / "after") is None
    assert asked(ready(buckets=[24, 32]), tmp_path / "other") is not None
    chosen = choose(settings_from_json(ready(learning_rate=0.5)))
    assert (chosen.settings.workload.strategy, chosen.table) == (table["fastest"], table)
    assert choose(settings_from_json(ready(strategy="eager"))).table == table


def test_settings_that_no_strategy_can_use_are_refused(ready: Callable[..., Json], tmp_path: Path) -> None:
    file = tmp_path / "settings.json"
    settings = {**ready(), "prepared": None}
    file.write_text(json.dumps(settings))
    with pytest.raises(InputError, match="prepare"):
        tune(settings_from_json(settings), file, tmp_path)
    assert not (tmp_path / "tuning.json").exists()


@pytest.mark.slow
def test_a_strategy_that_is_wrong_or_crashes_is_a_row_and_nothing_is_kept(
    ready: Callable[..., Json], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a copy of the trainer whose gradients are wrong, and which dies of one of its strategies."""
    root, out = tmp_path / "release", tmp_path / "out"
    out.mkdir()
    shutil.copytree(ROOT / "trainer", root / "trainer", ignore=shutil.ignore_patterns("__pycache__"))
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(tmp_path)}
    patch = ["git", "apply", "-p1", str(FAULTS / "wrong-gradient-one-worker.patch")]
    subprocess.run(patch, cwd=root, env=environment, check=True)
    parts = root / "trainer" / "parts.py"
    line = "    dtype = DTYPES[work.dtype]\n"
    assert line in parts.read_text()
    parts.write_text(parts.read_text().replace(line, line + '    if work.strategy == "default":\n        os.abort()\n'))
    settings = ready(cache=str(tmp_path / "cache"))
    file = tmp_path / "settings.json"
    file.write_text(json.dumps(settings))
    monkeypatch.chdir(root)
    monkeypatch.setenv("PYTHONPATH", str(root))
    assert tune(settings_from_json(settings), file, out, strategies=("eager", "default")) == 6
    table = json.loads((out / "tuning.json").read_text())
    rows = {row["strategy"]: row for row in table["strategies"]}
    assert (rows["eager"]["outcome"], rows["eager"]["step_ms"], table["fastest"]) == ("wrong", None, None)
    assert "gradients (drafter 1)" in rows["eager"]["why"]
    assert rows["default"]["outcome"] == "failed" and "SIGABRT" in rows["default"]["why"]
    assert not (tmp_path / "cache" / "tuning").exists()
