"""Settings of the contract: every key, its type, its default and its range."""

from __future__ import annotations

import json
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, Callable, Optional, TypeVar

from .errors import InputError, nearest

Check = Callable[[Any], Optional[str]]
T = TypeVar("T")
STRATEGIES = ("eager", "default", "reduce-overhead", "reduce-overhead-trees", "whole-step")
AUTO = "auto"


def _integer(least: int) -> Check:
    def check(value: Any) -> str | None:
        good = isinstance(value, int) and not isinstance(value, bool) and value >= least
        return None if good else f"a whole number of at least {least}"

    return check


def _number(least: float, most: float) -> Check:
    def check(value: Any) -> str | None:
        good = isinstance(value, (int, float)) and not isinstance(value, bool) and least <= value <= most
        return None if good else f"a number from {least} to {most}"

    return check


def _one_of(*names: str) -> Check:
    return lambda value: None if value in names else "one of " + ", ".join(names)


def _text(value: Any) -> str | None:
    return None if isinstance(value, str) and value else "a string"


def _flag(value: Any) -> str | None:
    return None if isinstance(value, bool) else "true or false"


def _variables(value: Any) -> str | None:
    good = isinstance(value, dict) and all(isinstance(each, (bool, int, float, str)) for each in value.values())
    return None if good else "a mapping of names to a text, a number, true or false"


def _text_or_id(value: Any) -> str | None:
    return None if _text(value) is None or _integer(0)(value) is None else "a token or its id"


def _or_null(check: Check) -> Check:
    def either(value: Any) -> str | None:
        wrong = None if value is None else check(value)
        return wrong and wrong + " or null"

    return either


def _list(word: str | None, check: Check, length: int | None = None) -> Check:
    def either(value: Any) -> str | None:
        if word is not None and value == word:
            return None
        good = isinstance(value, list) and value and all(check(entry) is None for entry in value)
        if good and length in (None, len(value)):
            return None
        return (f'"{word}" or ' if word else "") + f"a list, each entry {check(object())}"

    return either


def _buckets(value: Any) -> str | None:
    wrong = _list(None, _integer(1))(value)
    return wrong or (None if value == sorted(set(value)) else "an ascending list")


@dataclass(frozen=True)
class Workload:
    """What the canary's verdict depends on."""

    target: str
    mask_token: str | int
    require_cuda: bool = True
    gpus: str | list[Any] = "all"
    drafter_threads: int = 1
    target_workers: int = 1
    target_gpus: int = 1
    drafter_devices: str | list[str] = "auto"
    target_devices: str | list[str] = "auto"
    dtype: str = "bfloat16"
    target_dtype: str = "bfloat16"
    linear_precision: str = "dtype"
    master_weights: str = "float32"
    hidden_states: str = "online"
    target_forward: str = "graph"
    strategy: str = "reduce-overhead"
    block_size: int = 16
    anchors: int = 512
    buckets: list[int] | tuple = (3072,)
    batch_size: int = 1
    accumulation: int = 1
    draft_layers: int = 5
    target_layers: str | list[int] = "auto"
    draft_ffn: int | None = None
    layer_types: str | list[str] = "auto"
    sliding_window: int | None = None
    sliding_window_origin: str = "query"
    sliding_window_non_causal: bool = False
    loss_type: str = "dflash"
    canary_steps: int = 3
    rehearsal_steps: int = 3
    canary_timeout_s: int = 600
    throughput_check: bool = True


@dataclass(frozen=True)
class Training:
    """What the canary's verdict does not depend on."""

    steps: int
    learning_rate: float = 6e-4
    warmup_ratio: float = 0.04
    weight_decay: float = 0.0
    betas: list[float] | tuple = (0.9, 0.95)
    clip: float = 1.0
    decay_gamma: float | None = None
    anchor_eligibility: str = "specforge"
    seed: int = 0
    data: str | None = None
    prompts: str | None = None
    prompt_field: str = "prompt"
    prompt_count: int = 64
    bad_prompts: int = 0
    chat_template_kwargs: dict | None = None
    engine: str = "transformers"
    endpoint: str | None = None
    endpoint_model: str | None = None
    endpoint_concurrency: int = 16
    answer_tokens: int = 64
    answer_batch: int = 16
    evaluation_prompts: int = 8
    evaluation_tokens: int = 32
    evaluate_every: int | None = None
    checkpoint_every: int = 100
    log_every: int = 1
    resume_from: str | None = None
    init_from: str | None = None


@dataclass(frozen=True)
class Settings:
    """One settings file."""

    workload: Workload
    training: Training
    run: str | None
    prepared: Path | None
    cache: Path


_WORKLOAD: dict[str, Check] = {
    "target": _text,
    "mask_token": _text_or_id,
    "require_cuda": _flag,
    "gpus": _list("all", _text_or_id),
    "drafter_threads": _integer(1),
    "target_workers": _integer(1),
    "target_gpus": _integer(1),
    "drafter_devices": _list("auto", _text),
    "target_devices": _list("auto", _text),
    "dtype": _one_of("float32", "bfloat16"),
    "target_dtype": _one_of("float32", "bfloat16"),
    "linear_precision": _one_of("dtype", "fp8"),
    "master_weights": _one_of("float32", "none"),
    "hidden_states": _one_of("online", "offline"),
    "target_forward": _one_of("graph", "eager"),
    "strategy": _one_of(*STRATEGIES, AUTO),
    "block_size": _integer(2),
    "anchors": _integer(1),
    "buckets": _buckets,
    "batch_size": _integer(1),
    "accumulation": _integer(1),
    "draft_layers": _integer(1),
    "target_layers": _list("auto", _integer(0)),
    "draft_ffn": _or_null(_integer(1)),
    "layer_types": _list("auto", _one_of("full_attention", "sliding_attention")),
    "sliding_window": _or_null(_integer(2)),
    "sliding_window_origin": _one_of("query", "anchor"),
    "sliding_window_non_causal": _flag,
    "loss_type": _one_of("dflash", "dpace"),
    "canary_steps": _integer(1),
    "rehearsal_steps": _integer(1),
    "canary_timeout_s": _integer(1),
    "throughput_check": _flag,
}
_TRAINING: dict[str, Check] = {
    "steps": _integer(1),
    "learning_rate": _number(0, 1e6),
    "warmup_ratio": _number(0, 1),
    "weight_decay": _number(0, 1e6),
    "betas": _list(None, _number(0, 1), 2),
    "clip": _number(0, 1e9),
    "decay_gamma": _or_null(_number(1e-6, 1e9)),
    "anchor_eligibility": _one_of("specforge", "torchspec", "speculators"),
    "seed": _integer(0),
    "data": _or_null(_text),
    "prompts": _or_null(_text),
    "prompt_field": _text,
    "prompt_count": _integer(1),
    "bad_prompts": _integer(0),
    "chat_template_kwargs": _or_null(_variables),
    "engine": _one_of("transformers", "openai"),
    "endpoint": _or_null(_text),
    "endpoint_model": _or_null(_text),
    "endpoint_concurrency": _integer(1),
    "answer_tokens": _integer(1),
    "answer_batch": _integer(1),
    "evaluation_prompts": _integer(0),
    "evaluation_tokens": _integer(1),
    "evaluate_every": _or_null(_integer(1)),
    "checkpoint_every": _integer(1),
    "log_every": _integer(1),
    "resume_from": _or_null(_text),
    "init_from": _or_null(_text),
}
_TOP = ("contract", "run", "workload", "training", "prepared", "cache")


def _table(kind: type[T], checks: dict[str, Check], raw: Any, where: str) -> T:
    if not isinstance(raw, dict):
        raise InputError(f"{where} is not a table", where, "write it as a JSON object")
    for key, value in raw.items():
        if key not in checks:
            raise InputError(f"unknown key `{key}`", f"{where}.{key}", nearest(key, checks))
        wanted = checks[key](value)
        if wanted:
            raise InputError(f"{value!r} is not {wanted}", f"{where}.{key}", f"give {wanted}")
    for field in fields(kind):  # type: ignore[arg-type]
        if field.default is MISSING and field.name not in raw:
            raise InputError(f"`{field.name}` is missing", f"{where}.{field.name}", "add it")
    return kind(**raw)


def _devices(workload: Workload) -> None:
    for key, count in (
        ("drafter", workload.drafter_threads),
        ("target", workload.target_workers * workload.target_gpus),
    ):
        devices = getattr(workload, f"{key}_devices")
        if devices != "auto" and len(devices) != count:
            where = f"workload.{key}_devices"
            raise InputError(f"{len(devices)} devices for {count} threads", where, f"give {count} entries")


def load(path: Path) -> Settings:
    """Read a settings file; anything that the contract does not know is an `InputError`."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read the settings: {error}", str(path), "give a JSON file") from error
    if not isinstance(raw, dict):
        raise InputError("the settings are not a table", str(path), "write a JSON object")
    for key in raw:
        if key not in _TOP:
            raise InputError(f"unknown key `{key}`", key, nearest(key, _TOP))
    for key in ("contract", "workload", "training", "cache"):
        if key not in raw:
            raise InputError(f"`{key}` is missing", key, "add it")
    if raw["contract"] != 1:
        raise InputError(f"contract {raw['contract']!r} is not known", "contract", "this trainer speaks 1")
    for key in ("run", "prepared"):
        wanted = _or_null(_text)(raw.get(key))
        if wanted:
            raise InputError(f"{raw[key]!r} is not {wanted}", key, f"give {wanted}")
    if _text(raw["cache"]):
        raise InputError(f"{raw['cache']!r} is not a path", "cache", "give a folder")
    workload = _table(Workload, _WORKLOAD, raw["workload"], "workload")
    training = _table(Training, _TRAINING, raw["training"], "training")
    _devices(workload)
    if training.resume_from is not None and training.init_from is not None:
        raise InputError("resume_from is given too", "training.init_from", "give one of them")
    if training.evaluate_every is not None and not training.evaluation_prompts:
        raise InputError("nothing is held out", "training.evaluate_every", "give evaluation_prompts of at least 1")
    prepared = Path(raw["prepared"]) if raw.get("prepared") else None
    return Settings(workload, training, raw.get("run"), prepared, Path(raw["cache"]))
