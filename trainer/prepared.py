"""What `prepare` makes, and how it is found again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

from trainer.data import HeldOut, holds_messages
from trainer.errors import InputError
from trainer.settings import Settings

DATASET, EVALUATION, PREPARED = "dataset", "evaluation.json", "prepare.json"


def is_prepared(settings: Settings) -> bool:
    """Whether rows come from `prepare`: not where `training.data` has token ids. Raises `InputError`."""
    data = settings.training.data
    return data is None or holds_messages(Path(data), "training.data")


def read_held_out(prepared: Path) -> list[HeldOut]:
    """The held-out prompts and answers of a prepared folder. Raises `InputError`."""
    path = prepared / EVALUATION
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        items = cast("list[dict[str, Any]]", value["prompts"])
        return [HeldOut(tuple(each["prompt"]), tuple(each["answer"])) for each in items]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"cannot read: {error}", str(path), "prepare the data again") from error
