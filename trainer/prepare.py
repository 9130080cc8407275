"""Prepared data: the target itself answers the prompts, greedily. The last prompts are held out for evaluation."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import datasets
import torch

from trainer.assets import resolve_asset
from trainer.data import HeldOut
from trainer.errors import InputError
from trainer.files import sha256_file, write_json
from trainer.mask_token import resolve_mask_token
from trainer.placement import DTYPES, place
from trainer.prompts import prompt_ids, read_prompts
from trainer.settings import CONTRACT, Settings
from trainer.target import Target
from trainer.target_files import target_identity

# raise it when the code makes other data from the same input
_VERSION = "1"
DATASET, EVALUATION, PREPARED = "dataset", "evaluation.json", "prepare.json"

log = logging.getLogger(__name__)


def prompts_path(settings: Settings) -> Path:
    """The prompts' file. Raises `InputError` where neither data nor prompts are given."""
    if settings.training.prompts is None:
        raise InputError(
            "neither data nor prompts are given",
            "training.data",
            "give data (a datasets folder), or prompts (JSON lines) that the target answers",
        )
    return resolve_asset(settings.training.prompts, "training.prompts")


def prepare_key(settings: Settings) -> str:
    """Hex digest of all that the prepared data depends on."""
    training, work = settings.training, settings.workload
    parts = {
        "version": _VERSION,
        "target": target_identity(resolve_asset(work.target, "workload.target")),
        "target_dtype": work.target_dtype,
        "prompts": sha256_file(prompts_path(settings)),
        "prompt_field": training.prompt_field,
        "prompt_count": training.prompt_count,
        "evaluation_prompts": training.evaluation_prompts,
        "answer_tokens": training.answer_tokens,
        "answer_batch": training.answer_batch,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def prepare(settings: Settings, out: Path) -> None:
    """Write `dataset/`, `evaluation.json` and, last, `prepare.json` into `out`. Raises `InputError`."""
    started = time.monotonic()
    training, work = settings.training, settings.workload
    texts = read_prompts(prompts_path(settings), training.prompt_field, training.prompt_count)
    device = place(work, torch.cuda.device_count()).targets[0]
    path = resolve_asset(work.target, "workload.target")
    target = Target.load(path, device, DTYPES[work.target_dtype], (0,), settings.cache)
    mask_token = resolve_mask_token(work.mask_token, target.tokenizer, target.config.vocab_size)
    prompts = [prompt_ids(text, target.tokenizer) for text in texts]
    answers = answer(target, prompts, training.answer_tokens, training.answer_batch)
    for row, ids in enumerate(zip(prompts, answers, strict=True)):
        if any(mask_token in part for part in ids):
            raise InputError(
                f"the mask token (id {mask_token}) occurs in prompt {row} or its answer",
                "workload.mask_token",
                "take a reserved token that no text uses",
            )
    kept = len(prompts) - training.evaluation_prompts
    dataset = datasets.Dataset.from_dict(
        {
            "input_ids": [prompt + reply for prompt, reply in zip(prompts[:kept], answers[:kept], strict=True)],
            "loss_mask": [
                [0] * len(prompt) + [1] * len(reply)
                for prompt, reply in zip(prompts[:kept], answers[:kept], strict=True)
            ],
        },
        features=datasets.Features(
            {
                "input_ids": datasets.Sequence(datasets.Value("int32")),
                "loss_mask": datasets.Sequence(datasets.Value("int8")),
            }
        ),
    )
    dataset.save_to_disk(str(out / DATASET))
    held_out = [
        {"prompt": prompt, "answer": reply} for prompt, reply in zip(prompts[kept:], answers[kept:], strict=True)
    ]
    write_json(out / EVALUATION, {"contract": CONTRACT, "prompts": held_out})
    seconds = time.monotonic() - started
    log.info("%d prompts answered in %.1f s, %d held out", len(prompts), seconds, len(held_out))
    write_json(
        out / PREPARED,
        {
            "contract": CONTRACT,
            "key": prepare_key(settings),
            "rows": kept,
            "evaluation_prompts": len(held_out),
            "prompt_tokens": sum(len(each) for each in prompts),
            "answer_tokens": sum(len(each) for each in answers),
            "seconds": round(seconds, 1),
        },
    )


@torch.no_grad()
def answer(target: Target, prompts: Sequence[Sequence[int]], tokens: int, batch: int) -> list[list[int]]:
    """The target's greedy answers, at most `tokens` long, with the end token where it came.

    Prompts of like length are answered together, padded on the left.
    """
    pad = target.tokenizer.pad_token_id
    filler = pad if pad is not None else min(target.eos_ids, default=0)
    order = sorted(range(len(prompts)), key=lambda index: (len(prompts[index]), index))
    answers: list[list[int]] = [[] for _ in prompts]
    for start in range(0, len(order), batch):
        part = order[start : start + batch]
        width = max(len(prompts[index]) for index in part)
        ids = torch.full((len(part), width), filler, dtype=torch.long)
        seen = torch.zeros_like(ids)
        for row, index in enumerate(part):
            length = len(prompts[index])
            ids[row, width - length :] = torch.tensor(prompts[index], dtype=torch.long)
            seen[row, width - length :] = 1
        made = target.model.generate(
            input_ids=ids.to(target.device),
            attention_mask=seen.to(target.device),
            max_new_tokens=tokens,
            do_sample=False,
            pad_token_id=filler,
            eos_token_id=sorted(target.eos_ids) or None,
        )
        for row, index in enumerate(part):
            answers[index] = _until_end(made[row, width:].tolist(), target.eos_ids)
        log.info("answered %d of %d prompts", min(start + batch, len(order)), len(order))
    return answers


def _until_end(ids: list[int], ends: frozenset[int]) -> list[int]:
    for index, token in enumerate(ids):
        if token in ends:
            return ids[: index + 1]
    return ids


def read_held_out(prepared: Path) -> list[HeldOut]:
    """The held-out prompts and answers of a prepared folder. Raises `InputError`."""
    path = prepared / EVALUATION
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        items = cast("list[dict[str, Any]]", value["prompts"])
        return [HeldOut(tuple(each["prompt"]), tuple(each["answer"])) for each in items]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"cannot read: {error}", str(path), "prepare the data again") from error
