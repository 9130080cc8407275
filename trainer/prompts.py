"""The prompts that the target answers: JSON lines, gzip or not."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from trainer.errors import InputError, nearest

_WHERE = "training.prompts"


def read_prompts(path: Path, field: str, count: int) -> list[str]:
    """The first `count` prompts of a file, one JSON object a line. Raises `InputError` with file and line."""
    with path.open("rb") as stream:
        packed = stream.read(2) == b"\x1f\x8b"
    prompts: list[str] = []
    try:
        with gzip.open(path, "rb") if packed else path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if len(prompts) == count:
                    break
                if line.strip():
                    prompts.append(_prompt(line, field, f"{path}:{number}"))
    except (OSError, EOFError) as error:
        raise InputError(f"cannot read {path}: {error}", _WHERE, "give a file of JSON lines, gzip or not") from error
    if len(prompts) < count:
        raise InputError(
            f"{path} has {len(prompts)} prompts, {count} are wanted",
            "training.prompt_count",
            f"give at most {len(prompts)}",
        )
    return prompts


def _prompt(line: bytes, field: str, where: str) -> str:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise InputError(f"not JSON: {error}", where, "write one JSON object a line") from error
    if not isinstance(value, dict):
        raise InputError("not a JSON object", where, "write one JSON object a line")
    found = value.get(field)
    if not isinstance(found, str) or not found:
        guess = nearest(field, (key for key, item in value.items() if isinstance(item, str)))
        raise InputError(
            f"no text under {field!r}",
            where,
            f"did you mean training.prompt_field: {guess}?" if guess else f"its keys are {', '.join(value)}",
        )
    return found


def prompt_ids(text: str, tokenizer: Any) -> list[int]:
    """Token ids of one prompt as the target expects it: through its chat template where it has one."""
    if not tokenizer.chat_template:
        return [int(each) for each in tokenizer(text)["input_ids"]]
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
    )
    # the template writes the special tokens itself
    return [int(each) for each in tokenizer(rendered, add_special_tokens=False)["input_ids"]]
