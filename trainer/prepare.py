"""Prepared data: the target itself answers the prompts, greedily. The last prompts are held out for evaluation."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import datasets
import torch

from trainer.assets import resolve_asset
from trainer.data import HeldOut
from trainer.engine import Engine, Prompts, TransformersEngine
from trainer.errors import InputError
from trainer.files import file_lock, fsync_dir, fsync_file, sha256_file, write_json
from trainer.journal import Journal
from trainer.mask_token import resolve_mask_token
from trainer.placement import DTYPES, place
from trainer.progress import Progress
from trainer.prompts import prompt_ids, read_prompts
from trainer.settings import CONTRACT, Settings
from trainer.target import Target
from trainer.target_files import target_identity

# raise it when the code makes other data from the same input
_VERSION = "1"
DATASET, EVALUATION, PREPARED = "dataset", "evaluation.json", "prepare.json"
_JOURNAL, _LOCK = "answers.ndjson", ".lock"

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
    """Write `dataset/`, `evaluation.json` and, last, `prepare.json` into `out`. Raises `InputError`.

    What an earlier `prepare` of the same data left in `out` is gone on from: its answers are in the journal. The
    result is the same, bit for bit, as that of one which nobody disturbed.
    """
    key = prepare_key(settings)
    with file_lock(out / _LOCK):
        if _is_made(out, key):
            log.info("%s is whole already", out)
            return
        journal = Journal(out / _JOURNAL, key)
        try:
            _make(settings, key, out, journal)
        finally:
            journal.close()
        journal.remove()


def _is_made(out: Path, key: str) -> bool:
    """Whether this data is there, whole. Raises `InputError` where other data is."""
    try:
        found = json.loads((out / PREPARED).read_text(encoding="utf-8")).get("key")
    except FileNotFoundError:
        return False
    if found != key:
        raise InputError("it holds data of other settings", str(out), "give an empty folder for --out")
    return True


def _make(settings: Settings, key: str, out: Path, journal: Journal) -> None:
    started = time.monotonic()
    training, work = settings.training, settings.workload
    texts = read_prompts(prompts_path(settings), training.prompt_field, training.prompt_count)
    device = place(work, torch.cuda.device_count()).targets[0]
    path = resolve_asset(work.target, "workload.target")
    target = Target.load(path, device, DTYPES[work.target_dtype], (0,), settings.cache)
    mask_token = resolve_mask_token(work.mask_token, target.tokenizer, target.config.vocab_size)
    prompts = [prompt_ids(text, target.tokenizer) for text in texts]
    engine = TransformersEngine(target, training.answer_tokens, training.answer_batch)
    found = answer_all(engine, dict(enumerate(prompts)), journal, 0)
    answers = [found[row] for row in range(len(prompts))]
    for row, ids in enumerate(zip(prompts, answers, strict=True)):
        if any(mask_token in part for part in ids):
            raise InputError(
                f"the mask token (id {mask_token}) occurs in prompt {row} or its answer",
                "workload.mask_token",
                "take a reserved token that no text uses",
            )
    kept = len(prompts) - training.evaluation_prompts
    _write_dataset(
        out,
        [[*prompt, *reply] for prompt, reply in zip(prompts[:kept], answers[:kept], strict=True)],
        [[0] * len(prompt) + [1] * len(reply) for prompt, reply in zip(prompts[:kept], answers[:kept], strict=True)],
    )
    held_out = [
        {"prompt": prompt, "answer": list(reply)} for prompt, reply in zip(prompts[kept:], answers[kept:], strict=True)
    ]
    write_json(out / EVALUATION, {"contract": CONTRACT, "prompts": held_out})
    seconds = time.monotonic() - started
    log.info("%d prompts answered in %.1f s, %d held out", len(prompts), seconds, len(held_out))
    write_json(
        out / PREPARED,
        {
            "contract": CONTRACT,
            "key": key,
            "rows": kept,
            "evaluation_prompts": len(held_out),
            "prompt_tokens": sum(len(each) for each in prompts),
            "answer_tokens": sum(len(each) for each in answers),
            "seconds": round(seconds, 1),
        },
    )


def answer_all(engine: Engine, prompts: Prompts, journal: Journal, turn: int) -> Mapping[int, Sequence[int]]:
    """The answers to all `prompts`, by row: those of the journal, and the engine's, which go there as they come."""
    known = journal.of_turn(turn)
    progress = Progress("prompts answered", len(prompts), sum(row in known for row in prompts))
    for piece in engine.answers(prompts, frozenset(known)):
        journal.append(turn, piece)
        progress.add(len(piece))
    return journal.of_turn(turn)


def _write_dataset(out: Path, input_ids: Sequence[Sequence[int]], loss_mask: Sequence[Sequence[int]]) -> None:
    part, folder = out / f"{DATASET}.part", out / DATASET
    for left in (part, folder):
        shutil.rmtree(left, ignore_errors=True)
    dataset = datasets.Dataset.from_dict(
        {"input_ids": input_ids, "loss_mask": loss_mask},
        features=datasets.Features(
            {
                "input_ids": datasets.Sequence(datasets.Value("int32")),
                "loss_mask": datasets.Sequence(datasets.Value("int8")),
            }
        ),
    )
    dataset.save_to_disk(str(part))
    for each in part.iterdir():
        fsync_file(each)
    part.rename(folder)
    fsync_dir(out)


def read_held_out(prepared: Path) -> list[HeldOut]:
    """The held-out prompts and answers of a prepared folder. Raises `InputError`."""
    path = prepared / EVALUATION
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        items = cast("list[dict[str, Any]]", value["prompts"])
        return [HeldOut(tuple(each["prompt"]), tuple(each["answer"])) for each in items]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"cannot read: {error}", str(path), "prepare the data again") from error
