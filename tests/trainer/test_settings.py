"""The settings file: defaults and ranges of the contract, and refusals that name the nearest right thing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trainer.errors import InputError
from trainer.settings import read_settings, settings_from_json

pytestmark = pytest.mark.torch


def minimal() -> dict[str, Any]:
    return {
        "contract": 1,
        "workload": {"target": "t", "mask_token": "<m>"},
        "training": {"steps": 1},
        "cache": "/c",
    }


def refusal(value: object) -> InputError:
    with pytest.raises(InputError) as caught:
        settings_from_json(value)
    return caught.value


def test_defaults_are_the_contract_s() -> None:
    settings = settings_from_json(minimal())
    work, training = settings.workload, settings.training
    assert (work.require_cuda, work.gpus, work.drafter_threads, work.strategy) == (True, "all", 1, "reduce-overhead")
    assert (work.block_size, work.anchors, work.buckets, work.draft_layers) == (16, 512, (3072,), 5)
    assert (work.dtype, work.target_layers, work.draft_ffn, work.canary_timeout_s) == ("bfloat16", "auto", None, 600)
    assert (training.learning_rate, training.warmup_ratio, training.betas) == (6e-4, 0.04, (0.9, 0.95))
    assert (training.clip, training.decay_gamma, training.evaluation_prompts) == (1.0, None, 8)
    assert settings.run is None and settings.prepared is None


@pytest.mark.parametrize(
    ("section", "key", "value", "where", "said"),
    [
        ("training", "learning_rat", 1e-3, "training", "did you mean 'learning_rate'?"),
        ("workload", "anchor", 3, "workload", "did you mean 'anchors'?"),
        ("workload", "strategy", "reduce_overhead", "workload.strategy", "did you mean 'reduce-overhead'?"),
        ("workload", "block_size", 1, "workload.block_size", "an integer >= 2"),
        ("workload", "block_size", True, "workload.block_size", "an integer >= 2"),
        ("workload", "buckets", [64, 32], "workload.buckets", "ascending"),
        ("workload", "buckets", [], "workload.buckets", "ascending"),
        ("workload", "drafter_devices", ["cuda"], "workload.drafter_devices", "cuda:N"),
        ("workload", "drafter_devices", ["cpu", "cpu"], "workload.drafter_devices", "give 1 devices"),
        ("workload", "mask_token", None, "workload.mask_token", "a token or a token id"),
        ("training", "betas", [0.9], "training.betas", "two numbers"),
        ("training", "learning_rate", 0, "training.learning_rate", "(0, 1]"),
        ("training", "evaluation_prompts", 64, "training.evaluation_prompts", "less than prompt_count (64)"),
    ],
)
def test_refuses_with_place_and_nearest_right_thing(
    section: str, key: str, value: object, where: str, said: str
) -> None:
    settings = minimal()
    settings[section][key] = value
    refused = refusal(settings)
    assert refused.where == where
    assert said in str(refused)


def test_missing_key_is_named() -> None:
    settings = minimal()
    del settings["training"]["steps"]
    assert "'steps' is missing" in str(refusal(settings))


def test_another_contract_is_refused() -> None:
    assert "contract 2" in str(refusal(minimal() | {"contract": 2}))


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot read"):
        read_settings(tmp_path / "none.json")
    (tmp_path / "half.json").write_text('{"contract": 1')
    with pytest.raises(InputError, match="not JSON"):
        read_settings(tmp_path / "half.json")


def test_command_line_ends_with_2_and_one_line(tmp_path: Path) -> None:
    file = tmp_path / "settings.json"
    settings = minimal()
    settings["training"]["step"] = 3
    file.write_text(json.dumps(settings))
    ended = subprocess.run(
        [sys.executable, "-m", "trainer", "check", "--settings", str(file), "--out", str(tmp_path / "out")],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        check=False,
    )
    assert ended.returncode == 2
    assert ended.stderr.splitlines()[-1] == ("refused: unknown key 'step' (at training); did you mean 'steps'?")
    assert "Traceback" not in ended.stderr
