"""Prompts, prepared rows, and which row every worker gets at every step."""

from __future__ import annotations

import gzip
import hashlib
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .assets import resolve
from .errors import InputError
from .settings import Settings, Training, Workload
from .target import Target, load_target


@dataclass(frozen=True)
class Row:
    """One sequence: token ids and, for each, whether the target wrote it (1) or the prompt did (0)."""

    id: int
    input_ids: list[int]
    loss_mask: list[int]

    def anchors(self) -> list[int]:
        """Return the eligible anchors: a and a + 1 both written by the target."""
        mask = self.loss_mask
        return [a for a in range(len(mask) - 1) if mask[a] and mask[a + 1]]


def read_prompts(training: Training, target: Target) -> list[list[int]]:
    """Return the encoded prompts of `training.prompts` in file order, held-out ones last."""
    where = "training.prompts"
    if training.prompts is None:
        return []
    path = resolve(training.prompts, where)
    raw = path.read_bytes()
    raw = gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
    prompts = []
    for number, line in enumerate(raw.decode("utf-8").splitlines(), 1):
        try:
            text = json.loads(line)[training.prompt_field]
        except (ValueError, KeyError, TypeError) as error:
            at = f"{where}: {path}, line {number}"
            raise InputError(f"no `{training.prompt_field}` here: {error!r}", at, "give JSON lines") from error
        prompts.append(target.encode(str(text)))
    if len(prompts) <= training.evaluation_prompts:
        fix = f"give more than {training.evaluation_prompts}, or hold out fewer"
        raise InputError(f"{len(prompts)} prompts, all held out", where, fix)
    return prompts


def held_out(training: Training, target: Target) -> list[list[int]]:
    """Return the last `evaluation_prompts` prompts, which are never trained on."""
    count = training.evaluation_prompts
    return read_prompts(training, target)[-count:] if count else []


def answered(prompts: list[list[int]], target: Target, tokens: int) -> list[Row]:
    """Let the target answer each prompt; the answer carries the loss."""
    rows = []
    for number, prompt in enumerate(prompts):
        answer = target.answer(prompt, tokens)
        rows.append(Row(number, prompt + answer, [0] * len(prompt) + [1] * len(answer)))
    return rows


def prepare_key(settings: Settings) -> str:
    """Digest all that the prepared rows depend on."""
    training = settings.training
    digest = hashlib.sha256(b"tiny rows 1")
    digest.update(load_target(settings.workload.target).source.read_bytes())
    digest.update(resolve(str(training.prompts), "training.prompts").read_bytes())
    for name in ("prompt_field", "prompt_count", "answer_tokens", "evaluation_prompts"):
        digest.update(f"{name}={getattr(training, name)};".encode())
    return digest.hexdigest()


def prepare_rows(settings: Settings) -> list[Row]:
    """Return the training rows: the first `prompt_count` prompts that are not held out, answered."""
    training = settings.training
    target = load_target(settings.workload.target)
    prompts = read_prompts(training, target)
    prompts = prompts[: len(prompts) - training.evaluation_prompts][: training.prompt_count]
    return answered(prompts, target, training.answer_tokens)


def rows_file(folder: Path) -> Path:
    """Name the rows of a data folder."""
    return folder / "rows.ndjson"


def load_rows(settings: Settings, mask: int) -> list[Row]:
    """Load `training.data`, or what `prepare` made; rows with nothing to learn are named in the log."""
    if settings.training.data is not None:
        where, folder = "training.data", resolve(settings.training.data, "training.data")
    elif settings.prepared is not None:
        where, folder = "prepared", resolve(str(settings.prepared), "prepared")
    else:
        raise InputError("there is no data", "prepared", "run `prepare` first, or set training.data")
    path = rows_file(folder)
    if not path.is_file():
        raise InputError("no rows here", f"{where}: {path}", "give a folder with rows.ndjson")
    longest = settings.workload.buckets[-1]
    rows, useless = [], []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines()):
        raw: dict[str, Any] = json.loads(line)
        row = Row(number, raw["input_ids"][:longest], raw["loss_mask"][:longest])
        if mask in row.input_ids:
            fix = "choose a reserved token"
            raise InputError(f"the mask token {mask} occurs in row {number}", "workload.mask_token", fix)
        (rows if row.anchors() else useless).append(row)
    if useless:
        print(f"{len(useless)} rows have no eligible anchor: {[row.id for row in useless]}", flush=True)
    if not rows:
        raise InputError("no row has an eligible anchor", f"{where}: {path}", "give longer answers")
    return rows


class Sampler:
    """Every row once an epoch; which row belongs to which (step, micro, worker, slot) is a pure function."""

    def __init__(self, rows: list[Row], workload: Workload, seed: int, longest_first: bool) -> None:
        self._rows = sorted(rows, key=lambda row: -len(row.input_ids)) if longest_first else rows
        self._workload = workload
        self._seed = None if longest_first else seed

    def batch(self, step: int, micro: int, worker: int) -> list[Row]:
        """Return the `batch_size` rows of one forward-backward."""
        shape = self._workload
        place = (step * shape.accumulation + micro) * shape.drafter_threads + worker
        return [self._row(place * shape.batch_size + slot) for slot in range(shape.batch_size)]

    def _row(self, place: int) -> Row:
        epoch, index = divmod(place, len(self._rows))
        order = list(range(len(self._rows)))
        if self._seed is not None:
            random.Random(f"{self._seed}/{epoch}").shuffle(order)
        return self._rows[order[index]]
