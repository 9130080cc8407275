"""Fixtures of the trainer's tests: a tiny target, prompts, settings on them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# read when torch is first imported, as in trainer.__main__: waiting threads must sleep, not spin
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"

import torch

if not torch.cuda.is_available():
    # read when triton is first imported: its kernels then run here too, written out in numpy
    os.environ["TRITON_INTERPRET"] = "1"

from tests.trainer.tiny_target import build_tiny_target, write_prompts


@pytest.fixture(autouse=True, scope="session")
def _few_threads() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    yield
    torch.compiler.reset()


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the tiny target."""
    return build_tiny_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="session")
def tiny_prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve prompts."""
    return write_prompts(tmp_path_factory.mktemp("prompts") / "prompts.jsonl", 12)


MakeSettings = Callable[..., dict[str, Any]]


@pytest.fixture
def make_settings(tiny_target: Path, tiny_prompts: Path, tmp_path: Path) -> MakeSettings:
    """Settings (the decoded JSON file) for the tiny target on the CPU; overrides by key of any section."""
    base: dict[str, Any] = {
        "workload": {
            "target": str(tiny_target),
            "require_cuda": False,
            "drafter_threads": 2,
            "dtype": "float32",
            "target_dtype": "float32",
            "strategy": "eager",
            "block_size": 4,
            "anchors": 4,
            "buckets": [32],
            "draft_layers": 2,
            "mask_token": "<reserved_0>",
            "canary_steps": 2,
            "rehearsal_steps": 2,
            "canary_timeout_s": 120,
        },
        "training": {
            "steps": 4,
            "learning_rate": 2e-3,
            "prompts": str(tiny_prompts),
            "prompt_count": 12,
            "answer_tokens": 16,
            "answer_batch": 6,
            "evaluation_prompts": 2,
            "evaluation_tokens": 12,
            "checkpoint_every": 2,
        },
    }

    def make(**overrides: Any) -> dict[str, Any]:
        settings: dict[str, Any] = {
            "contract": 1,
            "run": "test",
            "workload": dict(base["workload"]),
            "training": dict(base["training"]),
            "prepared": None,
            "cache": str(tmp_path / "cache"),
        }
        for key, value in overrides.items():
            home = next((part for part in ("workload", "training") if key in _keys(part)), None)
            (settings[home] if home else settings)[key] = value
        return settings

    return make


def _keys(section: str) -> set[str]:
    import dataclasses

    from trainer.settings import Training, Workload

    kind = Workload if section == "workload" else Training
    return {each.name for each in dataclasses.fields(kind)}


@pytest.fixture(scope="session")
def prepared_folder(tiny_target: Path, tiny_prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `prepare` makes with the base settings of `make_settings`."""
    from trainer.prepare import prepare
    from trainer.settings import settings_from_json

    out = tmp_path_factory.mktemp("prepared")
    settings = {
        "contract": 1,
        "workload": {
            "target": str(tiny_target), "require_cuda": False, "target_dtype": "float32", "mask_token": "<reserved_0>",
        },
        "training": {
            "steps": 1, "prompts": str(tiny_prompts), "prompt_count": 12, "answer_tokens": 16, "answer_batch": 6,
            "evaluation_prompts": 2,
        },
        "cache": str(tmp_path_factory.mktemp("cache")),
    }  # fmt: skip
    prepare(settings_from_json(settings), out)
    return out


@pytest.fixture(scope="session")
def ready(tiny_target: Path, tiny_prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> MakeSettings:
    """Settings on prepared data, two drafters, as small as can be; overrides are the workload's."""
    from trainer.prepare import prepare
    from trainer.settings import settings_from_json

    home = tmp_path_factory.mktemp("canary")
    base: dict[str, Any] = {
        "contract": 1,
        "workload": {
            "target": str(tiny_target),
            "mask_token": "<reserved_0>",
            "require_cuda": False,
            "drafter_threads": 2,
            "dtype": "float32",
            "target_dtype": "float32",
            "strategy": "eager",
            "block_size": 4,
            "anchors": 4,
            "buckets": [32],
            "draft_layers": 1,
            "canary_steps": 2,
            "rehearsal_steps": 1,
            "canary_timeout_s": 300,
        },
        "training": {
            "steps": 4,
            "prompts": str(tiny_prompts),
            "prompt_count": 12,
            "answer_tokens": 16,
            "evaluation_prompts": 1,
        },
        # compiled code is shared between the tests
        "cache": str(home / "cache"),
    }
    folder = home / "prepared"
    folder.mkdir()
    prepare(settings_from_json(base), folder)
    return lambda **changes: {**base, "prepared": str(folder), "workload": {**base["workload"], **changes}}
