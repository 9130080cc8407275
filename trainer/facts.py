"""What follows from the settings, the target's small files and the data, before any weight is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers

from trainer.anchors import anchor_rule
from trainer.assets import resolve_asset
from trainer.data import TrainingData
from trainer.dflash_model import DrafterConfig, create_drafter_config
from trainer.drafter_config import SlidingWindow
from trainer.errors import Caution, InputError
from trainer.mask_token import resolve_mask_token
from trainer.prepared import DATASET, PREPARED, is_prepared
from trainer.settings import Settings
from trainer.target import family_problem
from trainer.target_files import check_target_path, load_config, load_tokenizer


@dataclass(frozen=True)
class TargetFacts:
    """What is known of a target without its weights."""

    config: Any
    tokenizer: Any
    drafter: DrafterConfig


def target_facts(settings: Settings) -> TargetFacts:
    """Configuration, tokenizer and the drafter that follows from them. Raises `InputError`."""
    work = settings.workload
    path = resolve_asset(work.target, "workload.target")
    check_target_path(path, "workload.target")
    config, tokenizer = load_config(path, settings.cache), load_tokenizer(path, settings.cache)
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise family_problem(config.model_type)
    mask_token = resolve_mask_token(work.mask_token, tokenizer, config)
    drafter = create_drafter_config(
        config,
        draft_layers=work.draft_layers,
        block_size=work.block_size,
        mask_token_id=mask_token,
        target_layer_ids=None if isinstance(work.target_layers, str) else work.target_layers,
        intermediate_size=work.draft_ffn,
        layer_types=None if isinstance(work.layer_types, str) else work.layer_types,
        window=None
        if work.sliding_window is None
        else SlidingWindow(work.sliding_window, work.sliding_window_origin, causal=not work.sliding_window_non_causal),
    )
    return TargetFacts(config, tokenizer, drafter)


def cautions(drafter: DrafterConfig) -> list[Caution]:
    """What a run should be warned of before it trains this drafter."""
    if not drafter.reads_last_target_layer:
        return []
    last = drafter.target_layer_ids[-1]
    return [
        Caution(
            f"target layer {last} is the last one: the drafter learns from the final norm's output, vLLM hands over "
            "what comes before that norm, and `export` refuses such a drafter",
            "workload.target_layers",
            f"name layers below {last}, or leave it auto",
        )
    ]


def open_data(settings: Settings, tokenizer: Any, vocabulary: int, *, unfinished: Path | None = None) -> TrainingData:
    """The rows to train on: `training.data`, or what `prepare` made. Raises `InputError`.

    `unfinished`: the folder that `prepare` is at work in, with its rows in place and no `prepare.json` yet.
    """
    training = settings.training
    if training.data is not None and not is_prepared(settings):
        path, where, hold_out = Path(training.data), "training.data", training.evaluation_prompts
    elif unfinished is not None:
        path, where, hold_out = unfinished / DATASET, "--out", 0
    elif settings.prepared is not None and (settings.prepared / PREPARED).is_file():
        path, where, hold_out = settings.prepared / DATASET, "settings.prepared", 0
    else:
        raise InputError("there is no prepared data", "settings.prepared", "run prepare first")
    data = TrainingData(
        path,
        settings.workload.buckets,
        padding_id(tokenizer),
        where=where,
        hold_out=hold_out,
        rule=anchor_rule(training.anchor_eligibility, settings.workload.block_size),
    )
    if data.largest_id >= vocabulary:
        raise InputError(
            f"the data has token id {data.largest_id}, the target knows {vocabulary}",
            where,
            "use data made with this target's tokenizer",
        )
    return data


def padding_id(tokenizer: Any) -> int:
    """What fills a row beyond its length; it is never looked at."""
    return int(tokenizer.pad_token_id) if tokenizer.pad_token_id is not None else 0


def refuse_other_drafter(found: DrafterConfig, wanted: DrafterConfig, where: str) -> None:
    """Raise `InputError` where a checkpoint's drafter is not the one that the settings describe.

    `where`: what names the checkpoint.
    """
    for name, value in vars(wanted).items():
        if getattr(found, name) != value:
            raise InputError(
                f"the checkpoint has {name} {getattr(found, name)}, the settings give {value}",
                where,
                "give the workload of the checkpoint",
            )
