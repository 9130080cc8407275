"""The real trainer honours the trainer contract, by the same suite as the tiny one."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from tests.tiny_trainer_tests.harness import Json, Trainer
from tests.tiny_trainer_tests.suite import (
    REFUSALS,
    Refusal,
    TrainerContract,
    checked,
    is_refused,
    prepared,
    proven,
    ready,
    release_untouched,
    trained,
)

__all__ = ["checked", "prepared", "proven", "ready", "release_untouched", "trained"]

ROOT = Path(__file__).parents[2]
# a process of this trainer takes seconds to start: one refusal by the settings, two by the target and the machine
FEW = [each for each in REFUSALS if each.where in ("drafter_thread", "mask_token", "require_cuda")]


def real_settings(
    target: Path, prompts: Path, work: Path, workload: Json | None = None, training: Json | None = None
) -> Json:
    """Settings for the tiny target: two drafters on the CPU."""
    shape: dict[str, Any] = {
        "target": str(target),
        "require_cuda": False,
        "drafter_threads": 2,
        "dtype": "float32",
        "target_dtype": "float32",
        "strategy": "eager",
        "block_size": 4,
        "anchors": 4,
        "buckets": [32],
        "draft_layers": 1,
        "mask_token": "<reserved_0>",
        "canary_timeout_s": 300,
    }
    plan: dict[str, Any] = {
        "steps": 6,
        "learning_rate": 1e-2,
        "prompts": str(prompts),
        "prompt_count": 12,
        "answer_tokens": 16,
        "evaluation_prompts": 2,
        "evaluation_tokens": 12,
    }
    return {
        "contract": 1,
        "run": None,
        "workload": {**shape, **(workload or {})},
        "training": {**plan, **(training or {})},
        "prepared": None,
        "cache": str(work / "cache"),
    }


@pytest.fixture(scope="class")
def trainer(tiny_target: Path, tiny_prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    work = tmp_path_factory.mktemp("real")
    release = work / "release"
    shutil.copytree(ROOT / "trainer", release / "trainer", ignore=shutil.ignore_patterns("__pycache__"))
    return Trainer(
        "trainer",
        sys.executable,
        release,
        work,
        lambda **changes: real_settings(tiny_target, tiny_prompts, work, **changes),
    )


@pytest.mark.torch
@pytest.mark.slow
class TestRealTrainer(TrainerContract):
    """Every promise, kept by the real trainer."""

    @pytest.mark.parametrize("refusal", FEW, ids=lambda refusal: refusal.where)
    def test_check_refuses_and_names_the_place(self, trainer: Trainer, refusal: Refusal) -> None:
        is_refused(trainer, refusal)
