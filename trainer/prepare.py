"""Prepared data: the target itself answers the prompts, greedily, or messages are made into token ids and masks.

The last prompts are held out for evaluation. Where training is to read the target's hidden states from the disk, they
are written here too, also those of data that has token ids already.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import torch

from trainer.assets import resolve_asset
from trainer.bad_rows import MALFORMED, BadRows
from trainer.chat import Conversation, conversation_of, refuse_unread
from trainer.conversations import Row, Rules, answered, as_they_are
from trainer.data import open_folder
from trainer.endpoint import Endpoint, EndpointEngine
from trainer.engine import Engine, Prompts, TransformersEngine
from trainer.errors import InputError
from trainer.facts import open_data, target_facts
from trainer.files import file_lock, fingerprint_file, fsync_dir, fsync_file, sha256_file, write_json
from trainer.hidden_states import origin_of
from trainer.hidden_states_writer import JOURNAL as STATES_JOURNAL
from trainer.hidden_states_writer import write_hidden_states
from trainer.journal import Journal
from trainer.mask_token import resolve_mask_token
from trainer.placement import DTYPES, place
from trainer.prepared import DATASET, EVALUATION, PREPARED, is_prepared
from trainer.progress import Progress
from trainer.prompts import read_prompts
from trainer.settings import CONTRACT, OFFLINE, Settings
from trainer.target import Target, declared_ends
from trainer.target_files import load_config, load_tokenizer, target_identity

# raise it when the code makes other data from the same input
_VERSION = "2"
# raise it when the same rows get other hidden states, or other files
_STATES_VERSION = "1"
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
    parts: dict[str, object] = {
        "version": _VERSION,
        "target": target_identity(resolve_asset(work.target, "workload.target")),
        "mask_token": work.mask_token,
        "longest": work.buckets[-1],
        "evaluation_prompts": training.evaluation_prompts,
    }
    if training.chat_template_kwargs:
        parts["chat_template_kwargs"] = dict(training.chat_template_kwargs)
    if training.data is not None:
        folder = Path(training.data)
        parts["data"] = {
            str(each.relative_to(folder)): fingerprint_file(each)
            for each in sorted(folder.rglob("*"))
            if each.is_file()
        }
    else:
        parts |= {
            "prompts": sha256_file(prompts_path(settings)),
            "prompt_field": training.prompt_field,
            "prompt_count": training.prompt_count,
            "answer_tokens": training.answer_tokens,
            "engine": training.engine,
        }
        # where the endpoint is, and how often it is asked, makes no other data
        parts |= (
            {"target_dtype": work.target_dtype, "answer_batch": training.answer_batch}
            if training.engine == "transformers"
            else {"endpoint_model": training.endpoint_model}
        )
    if work.hidden_states == OFFLINE:
        parts["hidden_states"] = {
            "version": _STATES_VERSION,
            "target_layer_ids": target_facts(settings).drafter.target_layer_ids,
            "target_dtype": work.target_dtype,
            "buckets": work.buckets,
        }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def prepare(settings: Settings, out: Path) -> None:
    """Write `dataset/` and `evaluation.json`, `hidden_states/`, or both, and last `prepare.json` into `out`.

    Raises `InputError`, and `WorkerFailed` where hidden states could not be computed or written.

    What an earlier `prepare` of the same data left in `out` is gone on from: its answers are in the journal. The
    result is the same, bit for bit, as that of one which nobody disturbed.
    """
    key = prepare_key(settings)
    with file_lock(out / _LOCK):
        if _is_made(out, key):
            log.info("%s is whole already", out)
            return
        started = time.monotonic()
        made: dict[str, object] = {}
        if is_prepared(settings):
            with contextlib.closing(Journal(out / _JOURNAL, key)) as journal:
                made |= _make(settings, out, journal)
        if settings.workload.hidden_states == OFFLINE:
            made |= _make_states(settings, key, out)
        seconds = round(time.monotonic() - started, 1)
        write_json(out / PREPARED, {"contract": CONTRACT, "key": key, **made, "seconds": seconds})
        for name in (_JOURNAL, STATES_JOURNAL):
            (out / name).unlink(missing_ok=True)
        fsync_dir(out)


def _is_made(out: Path, key: str) -> bool:
    """Whether this data is there, whole. Raises `InputError` where other data is."""
    try:
        found = json.loads((out / PREPARED).read_text(encoding="utf-8")).get("key")
    except FileNotFoundError:
        return False
    if found != key:
        raise InputError("it holds data of other settings", str(out), "give an empty folder for --out")
    return True


def _make_states(settings: Settings, key: str, out: Path) -> dict[str, object]:
    """The hidden states of the rows; what `prepare.json` says of them."""
    facts = target_facts(settings)
    data = open_data(
        settings, facts.tokenizer, facts.config.vocab_size, unfinished=out if is_prepared(settings) else None
    )
    origin = origin_of(settings, facts.drafter, data)
    write_hidden_states(settings, key, origin, data, out)
    return {"hidden_states": {"rows": origin.rows, "tokens": origin.tokens, "bytes": origin.bytes}}


def _make(settings: Settings, out: Path, journal: Journal) -> dict[str, object]:
    """The rows and what is held out; what `prepare.json` says of them."""
    started = time.monotonic()
    work = settings.workload
    path = resolve_asset(work.target, "workload.target")
    tokenizer, config = load_tokenizer(path, settings.cache), load_config(path, settings.cache)
    mask_token = resolve_mask_token(work.mask_token, tokenizer, config)
    variables = settings.training.chat_template_kwargs
    refuse_unread(variables, tokenizer)
    conversations, bad = _conversations(settings)
    held_out = _held_out(conversations, settings.training.evaluation_prompts)
    usable = {number: each for number, each in conversations.items() if each is not None}
    shortened: list[int] = []

    def rules(ends: frozenset[int]) -> Rules:
        return Rules(tokenizer, ends, work.buckets[-1], mask_token, held_out, variables)

    if settings.training.data is None:
        engine, ends = _engine(settings, path, tokenizer)
        rows, shortened = answered(
            usable, lambda prompts, turn: answer_all(engine, prompts, journal, turn), rules(ends), bad, journal.beat
        )
    else:
        ends = declared_ends(path, settings.cache, tokenizer)
        rows = as_they_are(usable, rules(ends), bad, journal.beat)
    bad.refuse_too_many()
    bad.tell()
    kept = [row for number, row in sorted(rows.items()) if number not in held_out]
    aside = [row for number, row in sorted(rows.items()) if number in held_out]
    if not kept:
        raise InputError("no row is left to train on", "training.bad_prompts", "give prompts that can be used")
    _write_dataset(out, kept)
    prompts = [
        {"prompt": each.input_ids[: each.last_answer], "answer": each.input_ids[each.last_answer :]} for each in aside
    ]
    write_json(out / EVALUATION, {"contract": CONTRACT, "prompts": prompts})
    seconds = time.monotonic() - started
    log.info("%d rows and %d held out in %.1f s, %d left out", len(kept), len(aside), seconds, len(bad))
    both = [*kept, *aside]
    answer_tokens = sum(sum(each.loss_mask) for each in both)
    return {
        "rows": len(kept),
        "evaluation_prompts": len(aside),
        "prompt_tokens": sum(len(each.input_ids) for each in both) - answer_tokens,
        "answer_tokens": answer_tokens,
        "ended": sum(each.input_ids[-1] in ends for each in both),
        "bad": bad.to_json(),
        "shortened": shortened,
    }


def _conversations(settings: Settings) -> tuple[dict[int, Conversation | None], BadRows]:
    """What is to be made into rows, by line or row number; None: it is malformed, which is counted."""
    training = settings.training
    found: dict[int, Conversation | None] = {}
    if training.data is None:
        bad = BadRows("line", training.bad_prompts)
        read = read_prompts(prompts_path(settings), training.prompt_field, training.prompt_count)
        read.refuse_malformed(training.bad_prompts)
        found |= read.rows | dict.fromkeys(read.malformed)
    else:
        bad = BadRows("row", training.bad_prompts)
        for number, messages in enumerate(open_folder(Path(training.data), "training.data")["messages"]):
            try:
                found[number] = conversation_of(messages or ())
            except ValueError:
                found[number] = None
    for number, each in found.items():
        if each is None:
            bad.add(number, MALFORMED)
    return found, bad


def _held_out(numbers: Mapping[int, object], count: int) -> frozenset[int]:
    if count >= len(numbers):
        raise InputError(
            f"{count} of {len(numbers)} rows are held out: none is left to train on",
            "training.evaluation_prompts",
            f"give less than {len(numbers)}",
        )
    return frozenset(sorted(numbers)[len(numbers) - count :])


def _engine(settings: Settings, path: Path, tokenizer: Any) -> tuple[Engine, frozenset[int]]:
    """Who answers, and the tokens that end an answer."""
    work, training = settings.workload, settings.training
    if training.endpoint is not None:
        ends = declared_ends(path, settings.cache, tokenizer)
        endpoint = Endpoint(training.endpoint, training.endpoint_model, training.endpoint_concurrency)
        return EndpointEngine(endpoint, tokenizer, ends, training.answer_tokens), ends
    devices = place(work, torch.cuda.device_count()).target_groups[0]
    target = Target.load(path, devices, DTYPES[work.target_dtype], (0,), settings.cache)
    return TransformersEngine(target, training.answer_tokens, training.answer_batch), target.eos_ids


def answer_all(engine: Engine, prompts: Prompts, journal: Journal, turn: int) -> Mapping[int, Sequence[int]]:
    """The answers to all `prompts`, by row: those of the journal, and the engine's, which go there as they come."""
    known = journal.of_turn(turn)
    progress = Progress("prompts answered", len(prompts), sum(row in known for row in prompts))
    for piece in engine.answers(prompts, frozenset(known)):
        journal.append(turn, piece)
        progress.add(len(piece))
    return journal.of_turn(turn)


def _write_dataset(out: Path, rows: Sequence[Row]) -> None:
    part, folder = out / f"{DATASET}.part", out / DATASET
    for left in (part, folder):
        shutil.rmtree(left, ignore_errors=True)
    dataset = datasets.Dataset.from_dict(
        {"input_ids": [each.input_ids for each in rows], "loss_mask": [each.loss_mask for each in rows]},
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
