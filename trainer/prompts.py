"""The prompts that the target answers: JSON lines, gzip or not, each with a text or with messages."""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.chat import Conversation, conversation_of
from trainer.errors import InputError, nearest

_WHERE = "training.prompts"


@dataclass
class Prompts:
    """Conversations by line number (from 1), and what is wrong with the other lines."""

    rows: dict[int, Conversation] = field(default_factory=dict)
    malformed: dict[int, InputError] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.rows) + len(self.malformed)

    def refuse_malformed(self, allowed: int) -> None:
        """Raise the `InputError` of the first bad line where there are more than `allowed`."""
        if len(self.malformed) > allowed:
            first = next(iter(self.malformed.values()))
            more = f", and {len(self.malformed) - 1} more lines are bad" if len(self.malformed) > 1 else ""
            raise InputError(
                f"{first.what}{more}", first.where, f"{first.fix} (training.bad_prompts: {allowed} may be bad)"
            )


def read_prompts(path: Path, key: str, count: int) -> Prompts:
    """The first `count` lines that are not blank, one JSON object each. Raises `InputError` where there are fewer."""
    with path.open("rb") as stream:
        packed = stream.read(2) == b"\x1f\x8b"
    found = Prompts()
    try:
        with gzip.open(path, "rb") if packed else path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if len(found) == count:
                    break
                if line.strip():
                    try:
                        found.rows[number] = _prompt(line, key, f"{path}:{number}")
                    except InputError as error:
                        found.malformed[number] = error
    except (OSError, EOFError) as error:
        raise InputError(f"cannot read {path}: {error}", _WHERE, "give a file of JSON lines, gzip or not") from error
    if len(found) < count:
        raise InputError(
            f"{path} has {len(found)} prompts, {count} are wanted",
            "training.prompt_count",
            f"give at most {len(found)}",
        )
    return found


def _prompt(line: bytes, key: str, where: str) -> Conversation:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise InputError(f"not JSON: {error}", where, "write one JSON object a line") from error
    if not isinstance(value, dict):
        raise InputError("not a JSON object", where, "write one JSON object a line")
    found = value.get(key)
    if isinstance(found, str) and found:
        return ({"role": "user", "content": found},)
    if isinstance(found, list):
        return _messages(found, f"{where}, {key}")
    guess = nearest(key, _usable(value)) or next(iter(_usable(value)), None)
    raise InputError(
        f"no text and no messages under {key!r}",
        where,
        f"did you mean training.prompt_field: {guess}?" if guess else f"its keys are {', '.join(value)}",
    )


def _messages(found: list[Any], where: str) -> Conversation:
    try:
        return conversation_of(found)
    except ValueError as error:
        raise InputError(
            str(error), where, 'write [{"role": "user", "content": "..."}, ...]: a system message or none, then in turn'
        ) from error


def _usable(value: dict[str, Any]) -> list[str]:
    return [key for key, item in value.items() if isinstance(item, str | list) and item]
