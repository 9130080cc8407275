"""A real target, small enough for tests: a random Llama with a real tokenizer and chat template."""

from __future__ import annotations

import json
import os
import shutil
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# read when torch is first imported, as in trainer.__main__: waiting threads must sleep, not spin
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"

import torch

WORDS = [f"w{index}" for index in range(40)]
SPECIAL = ["<unk>", "<pad>", "<s>", "</s>", "<|user|>", "<|assistant|>", "<reserved_0>", "<reserved_1>"]
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|> {{ message['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("compiles"):
        headers = Path(sysconfig.get_paths()["include"]) / "Python.h"
        if not (shutil.which("g++") or shutil.which("c++")) or not headers.exists():
            pytest.skip("torch.compile on a CPU needs a C++ compiler and Python's headers (apt: g++, python3-dev)")


@pytest.fixture(autouse=True, scope="session")
def _few_threads() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    yield
    torch.compiler.reset()


def build_tiny_target(folder: Path, *, layers: int = 5, seed: int = 3) -> Path:
    """Write the target into `folder`: 48 tokens, hidden size 32, `layers` layers, greedy answers that repeat."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    raw = Tokenizer(models.WordLevel({word: index for index, word in enumerate(SPECIAL + WORDS)}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    raw.add_special_tokens([AddedToken(each, special=True) for each in SPECIAL])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, unk_token="<unk>", pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(SPECIAL) + len(WORDS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        pad_token_id=1,
        bos_token_id=2,
        eos_token_id=3,
        tie_word_embeddings=False,
        initializer_range=0.2,
    )
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config).eval()
    torch.random.set_rng_state(state)
    with torch.no_grad():
        # answers are made of words: no special token is ever the most likely one
        model.lm_head.weight[: len(SPECIAL)] = 0.0
    model.save_pretrained(folder)
    return folder


def write_prompts(path: Path, count: int, *, words: int = 3) -> Path:
    """`count` different short prompts as JSON lines."""
    lines = [
        json.dumps({"prompt": " ".join(WORDS[(7 * row + 3 * index) % len(WORDS)] for index in range(words))})
        for row in range(count)
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


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
