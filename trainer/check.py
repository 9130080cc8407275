"""The `check` verb: are these settings right for this machine? Seconds, no GPU work, nothing downloaded."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open

from trainer.chat import refuse_unread
from trainer.checkpoint import RESUME_TENSORS, load_checkpoint
from trainer.errors import Caution, InputError
from trainer.facts import TargetFacts, cautions, open_data, refuse_other_drafter, target_facts
from trainer.files import write_json
from trainer.fp8_rules import refuse_impossible_fp8
from trainer.hidden_states import HiddenStates, origin_of, token_bytes
from trainer.machine import uuid_of
from trainer.mask_token import refuse_mask_in_data
from trainer.optimizer import refuse_other_masters
from trainer.placement import Placement, place
from trainer.prepare import prepare_key, prompts_path
from trainer.prepared import PREPARED, is_prepared
from trainer.prompts import read_prompts
from trainer.settings import AUTO, CONTRACT, OFFLINE, Settings
from trainer.strategy import strategy_of
from trainer.tune.table import needs_tuning


class _Problems:
    """Collects what is refused, so that one check shows all of it."""

    def __init__(self) -> None:
        self.found: list[InputError] = []

    @contextlib.contextmanager
    def collect(self) -> Iterator[None]:
        try:
            yield
        except InputError as error:
            self.found.append(error)


def _data(settings: Settings, facts: TargetFacts | None) -> dict[str, str] | None:
    """Check the data that is there; what is to be prepared, or None. Raises `InputError`."""
    training = settings.training
    ready = settings.prepared is not None and (settings.prepared / PREPARED).is_file()
    made_here, offline = is_prepared(settings), settings.workload.hidden_states == OFFLINE
    states = ""
    if (ready or not made_here) and facts is not None:
        data = open_data(settings, facts.tokenizer, facts.config.vocab_size)
        refuse_mask_in_data(facts.drafter.mask_token_id, facts.tokenizer, facts.drafter.vocab_size, data)
        if offline:
            origin = origin_of(settings, facts.drafter, data)
            states = f"hidden states of {origin.tokens} tokens, {origin.bytes} bytes"
            if settings.prepared is not None and ready:
                HiddenStates.open(settings.prepared, origin)
    elif offline and facts is not None:
        states = f"hidden states, {token_bytes(settings, facts.drafter)} bytes a token"
    if offline and facts is None:
        # the key depends on the target, which is refused already
        return None
    if not made_here:
        return {"key": prepare_key(settings), "why": states} if offline else None
    if facts is not None:
        refuse_unread(training.chat_template_kwargs, facts.tokenizer)
    if training.data is not None:
        why = f"the conversations of {training.data} as token ids of {settings.workload.target}"
    else:
        read_prompts(prompts_path(settings), training.prompt_field, training.prompt_count).refuse_malformed(
            training.bad_prompts
        )
        why = (
            f"{training.prompt_count} prompts of {training.prompts}, answered by {settings.workload.target} "
            f"{f'at {training.endpoint} ' if training.endpoint else ''}"
            f"with up to {training.answer_tokens} tokens each"
        )
    return {"key": prepare_key(settings), "why": f"{why}; {states}" if states else why}


def _resume(settings: Settings, facts: TargetFacts | None) -> None:
    training = settings.training
    for key, path in (("resume_from", training.resume_from), ("init_from", training.init_from)):
        if path is not None:
            config, _ = load_checkpoint(Path(path), resumable=key == "resume_from")
            if facts is not None:
                refuse_other_drafter(config, facts.drafter, f"training.{key}")
    if training.resume_from is not None:
        # the names alone: the tensors may be many times the drafter
        with safe_open(Path(training.resume_from) / RESUME_TENSORS, "pt") as optimizer:
            refuse_other_masters(optimizer.keys(), settings.workload.masters)


def devices() -> list[dict[str, object]]:
    """The GPUs that torch sees."""
    found: list[dict[str, object]] = []
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        found.append(
            {
                "device": f"cuda:{index}",
                "uuid": uuid_of(torch.device("cuda", index)),
                "name": facts.name,
                "memory_bytes": facts.total_memory,
            }
        )
    return found


def _told(each: InputError | Caution) -> dict[str, str]:
    return {"what": each.what, "where": each.where, "fix": each.fix}


def check(settings: Settings, out: Path) -> list[InputError]:
    """Write `check.json`; the problems found (none: all is well)."""
    problems = _Problems()
    placement: Placement | None = None
    facts: TargetFacts | None = None
    prepare: dict[str, str] | None = None
    tune: dict[str, str] | None = None
    with problems.collect():
        placement = place(settings.workload, torch.cuda.device_count())
        if settings.workload.strategy != AUTO:
            strategy_of(settings.workload, placement)
    with problems.collect():
        facts = target_facts(settings)
        if placement is not None:
            refuse_impossible_fp8(settings.workload, placement, facts.drafter)
    with problems.collect():
        prepare = _data(settings, facts)
    with problems.collect():
        _resume(settings, facts)
    if facts is not None and not problems.found:
        tune = needs_tuning(settings, facts.drafter)
    refused = bool(problems.found)
    write_json(
        out / "check.json",
        {
            "contract": CONTRACT,
            "outcome": "refused" if refused else "ok",
            "problems": [_told(each) for each in problems.found],
            "warnings": [] if facts is None else [_told(each) for each in cautions(facts.drafter)],
            "prepare": None if refused else prepare,
            "tune": tune,
            "devices": devices(),
        },
    )
    return problems.found
