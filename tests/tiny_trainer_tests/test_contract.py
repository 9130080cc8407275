"""The tiny trainer honours the trainer contract."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from .harness import Json, Trainer
from .suite import TrainerContract, TuningContract, checked, prepared, proven, ready, release_untouched, trained

__all__ = ["checked", "prepared", "proven", "ready", "release_untouched", "trained"]

TESTS = Path(__file__).parents[1]


def tiny_settings(work: Path, workload: Json | None = None, training: Json | None = None) -> Json:
    """Return settings for the tiny trainer: two drafters, milliseconds."""
    shape: dict[str, Any] = {
        "target": "package:tiny_trainer/target.json",
        "require_cuda": False,
        "drafter_threads": 2,
        "strategy": "eager",
        "block_size": 4,
        "anchors": 4,
        "mask_token": "<mask>",
        "canary_timeout_s": 60,
    }
    plan: dict[str, Any] = {
        "steps": 6,
        "learning_rate": 0.05,
        "prompts": "package:tiny_trainer/prompts.jsonl",
        "answer_tokens": 12,
        "evaluation_prompts": 4,
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
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    work = tmp_path_factory.mktemp("tiny")
    return Trainer("tiny_trainer", sys.executable, TESTS, work, lambda **changes: tiny_settings(work, **changes))


class TestTinyTrainer(TrainerContract, TuningContract):
    """Every promise, kept by the tiny trainer."""
