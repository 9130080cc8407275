"""The settings that the canary's verdict does not depend on. Keys and defaults: docs/trainer-contract.md."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from dflash_ops.config.base import TEXT, Matches, Model
from dflash_ops.limits import MOST

Count = Annotated[int, Field(ge=1, le=MOST)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[float, Field(gt=0, le=MOST)]
PathText = Annotated[str, TEXT]
# no name and password in it: it is shown
Url = Annotated[str, Matches(r"https?://[^\s/@?#]+(/[^\s@?#]*)?", "a URL like http://127.0.0.1:8000/v1")]
RESERVED = (
    "messages|conversation|tools|documents|chat_template|add_generation_prompt|continue_final_message|tokenize|padding"
    "|truncation|max_length|return_tensors|return_dict|return_assistant_tokens_mask|tokenizer_kwargs"
)
Variable = Annotated[
    str, Matches(rf"(?!(?:{RESERVED})$)[A-Za-z_][A-Za-z0-9_]*", "a variable that the target's chat template reads")
]


class Training(Model):
    """Steps, learning rate, data, evaluation and checkpoints. Paths are paths on the host."""

    steps: Count
    """Optimiser steps."""
    learning_rate: Annotated[float, Field(gt=0, le=1)] = 6e-4
    """Peak; cosine with warm-up."""
    warmup_ratio: Fraction = 0.04
    """Share of the steps."""
    weight_decay: Annotated[float, Field(ge=0, le=1)] = 0.0
    betas: Annotated[tuple[Fraction, Fraction], Field(strict=False)] = (0.9, 0.95)
    """AdamW's."""
    clip: Positive = 1.0
    """Largest gradient norm."""
    decay_gamma: Positive | None = None
    """Decay of the loss weight along a block; null: by block size (16: 7, 10: 5, 8: 4)."""
    anchor_eligibility: Literal["specforge", "torchspec", "speculators"] = "specforge"
    """Which supervised tokens may be anchors, by a public trainer's rule."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    data: PathText | None = None
    """Folder for datasets.load_from_disk with input_ids and loss_mask, or messages; null: see `prompts`."""
    prompts: PathText | None = None
    """JSON lines (gzip or not) that the target answers: a path on the host, or package:NAME/FILE."""
    prompt_field: PathText = "prompt"
    """The key in each line of its text, or of its messages (list of role and content)."""
    prompt_count: Count = 64
    """Prompts that the target answers."""
    bad_prompts: Annotated[int, Field(ge=0, le=MOST)] = 0
    """Lines or rows that may be left out because they cannot be used; they are named. More are refused."""
    chat_template_kwargs: dict[Variable, bool | int | float | Annotated[str, TEXT]] | None = None
    """What the target's chat template is rendered with, by name: {enable_thinking: false} for Qwen3."""
    engine: Literal["transformers", "openai"] = "transformers"
    """Who answers: the target in the trainer's own process, or an OpenAI-compatible endpoint (vLLM, SGLang)."""
    endpoint: Annotated[Url | None, Field(validate_default=True)] = None
    """With engine openai: its URL up to and with /v1, as the host reaches it. Its key: OPENAI_API_KEY, a secret."""
    endpoint_model: PathText | None = None
    """The target's name there; null: the only one that is served."""
    endpoint_concurrency: Count = 16
    """Requests at a time."""
    answer_tokens: Count = 64
    """Longest answer, in tokens."""
    answer_batch: Count = 16
    """Prompts answered at a time."""
    evaluation_prompts: Annotated[int, Field(ge=0, le=MOST, validate_default=True)] = 8
    """Held out: the last of the prompts, never trained on."""
    evaluation_tokens: Count = 32
    """Tokens decoded for each of them."""
    evaluate_every: Count | None = None
    """Optimiser steps between two evaluations while training goes on; null: only at the start and the end."""
    checkpoint_every: Count = 100
    """Optimiser steps; one checkpoint is always written at the end."""
    log_every: Count = 1
    """Optimiser steps between two lines of metrics."""
    resume_from: PathText | None = None
    """A complete checkpoint on the host."""
    init_from: PathText | None = None
    """A checkpoint whose weights the run begins with, at step 0: on the host, or asset:NAME. Not with resume_from."""

    @field_validator("endpoint")
    @classmethod
    def _engine_and_endpoint(cls, url: str | None, info: ValidationInfo) -> str | None:
        if (info.data.get("engine") == "openai") != (url is not None):
            raise ValueError("goes with engine: openai, and that goes with the endpoint's URL")
        return url

    @field_validator("init_from")
    @classmethod
    def _one_beginning(cls, path: str | None, info: ValidationInfo) -> str | None:
        if path is not None and info.data.get("resume_from") is not None:
            raise ValueError("is given with resume_from: a run that goes on has its weights already")
        return path

    @field_validator("evaluate_every")
    @classmethod
    def _something_is_held_out(cls, every: int | None, info: ValidationInfo) -> int | None:
        if every is not None and info.data.get("evaluation_prompts") == 0:
            raise ValueError("needs evaluation_prompts of at least 1: nothing is held out that could be judged")
        return every

    @field_validator("evaluation_prompts")
    @classmethod
    def _some_are_left(cls, held_out: int, info: ValidationInfo) -> int:
        count = info.data.get("prompt_count", held_out + 1)
        if info.data.get("data") is None and held_out >= count:
            raise ValueError(f"holds out {held_out} prompts, prompt_count is {count}: none is left to train on")
        return held_out
