"""The settings file of docs/trainer-contract.md as frozen dataclasses.

Unknown keys, wrong types and values out of range are refused with `InputError`: the place in the file and the
nearest right thing. `Workload` is what the canary's verdict depends on, `Training` what it does not.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

from trainer.errors import InputError, nearest

CONTRACT = 1
AUTO = "auto"
"""The strategy that stands for the fastest right one of a table (`tune.table`)."""
ONLINE, OFFLINE = "online", "offline"
"""Where hidden states come from: the target's forward beside training, or the disk."""

_Check = Callable[[object, str], object]
_T = TypeVar("_T")


def _refuse(value: object, where: str, wanted: str) -> InputError:
    return InputError(f"{json.dumps(value, default=str)} is not {wanted}", where, f"give {wanted}")


def _integer(low: int | None = None) -> _Check:
    wanted = "an integer" if low is None else f"an integer >= {low}"

    def check(value: object, where: str) -> object:
        if isinstance(value, bool) or not isinstance(value, int) or (low is not None and value < low):
            raise _refuse(value, where, wanted)
        return value

    return check


def _number(low: float, high: float, *, low_open: bool = False, high_open: bool = False) -> _Check:
    wanted = f"a number in {'(' if low_open else '['}{low:g}, {high:g}{')' if high_open else ']'}"

    def check(value: object, where: str) -> object:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise _refuse(value, where, wanted)
        if not (low < value if low_open else low <= value) or not (value < high if high_open else value <= high):
            raise _refuse(value, where, wanted)
        return float(value)

    return check


def _boolean(value: object, where: str) -> object:
    if not isinstance(value, bool):
        raise _refuse(value, where, "true or false")
    return value


def _text(value: object, where: str) -> object:
    if not isinstance(value, str) or not value:
        raise _refuse(value, where, "a text that is not empty")
    return value


def _url(value: object, where: str) -> object:
    # no name and password in it: it is shown
    if not isinstance(value, str) or not re.fullmatch(r"https?://[^\s/@?#]+(/[^\s@?#]*)?", value):
        raise _refuse(value, where, "a URL like http://127.0.0.1:8000/v1")
    return value


RESERVED_VARIABLES = (
    *("messages", "conversation", "tools", "documents", "chat_template", "add_generation_prompt"),
    *("continue_final_message", "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict"),
    *("return_assistant_tokens_mask", "tokenizer_kwargs"),
)
"""What a chat template is given anyhow, or what belongs to transformers' `apply_chat_template`."""


def _variables(value: object, where: str) -> object:
    if not isinstance(value, dict):
        raise _refuse(value, where, "a mapping of names to a text, a number, true or false")
    for name, item in value.items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", str(name)) or name in RESERVED_VARIABLES:
            raise InputError(
                f"{name!r} is no variable that may be given to a chat template",
                where,
                "give those that the target's template reads, such as enable_thinking",
            )
        good = bool(item) if isinstance(item, str) else isinstance(item, int | float) and math.isfinite(item)
        if not good:
            raise _refuse(item, f"{where}.{name}", "a text that is not empty, a number, true or false")
    return dict(value)


def _choice(*options: str) -> _Check:
    def check(value: object, where: str) -> object:
        if value not in options:
            guess = nearest(str(value), options)
            hint = f"did you mean {guess!r}?" if guess else f"give one of {', '.join(options)}"
            raise InputError(f"{value!r} is not one of {', '.join(options)}", where, hint)
        return value

    return check


def _optional(check: _Check) -> _Check:
    return lambda value, where: None if value is None else check(value, where)


def _one_of(*checks: _Check, wanted: str) -> _Check:
    def check(value: object, where: str) -> object:
        for candidate in checks:
            try:
                return candidate(value, where)
            except InputError:
                continue
        raise _refuse(value, where, wanted)

    return check


def _list(check: _Check, wanted: str, *, ascending: bool = False) -> _Check:
    def check_list(value: object, where: str) -> object:
        if not isinstance(value, list) or not value:
            raise _refuse(value, where, wanted)
        items = tuple(check(item, f"{where}[{index}]") for index, item in enumerate(value))
        if ascending and list(items) != sorted(set(cast("tuple[int, ...]", items))):
            raise _refuse(value, where, wanted)
        return items

    return check_list


def _device(value: object, where: str) -> object:
    if isinstance(value, str):
        kind, _, index = value.partition(":")
        if value == "cpu" or (kind == "cuda" and index.isdecimal()):
            return value
    raise _refuse(value, where, "a device: cpu or cuda:N")


_devices = _one_of(_choice("auto"), _list(_device, "devices"), wanted='"auto" or a list of devices (cpu or cuda:N)')


def _key(check: _Check, default: object = dataclasses.MISSING) -> Any:
    # `default` belongs to the dataclass field; the check to its border with JSON
    return (
        field(default=default, metadata={"check": check})
        if default is not dataclasses.MISSING
        else field(metadata={"check": check})
    )


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What the canary's verdict depends on; every key as in docs/trainer-contract.md."""

    target: str = _key(_text)
    mask_token: str | int = _key(_one_of(_integer(0), _text, wanted="a token or a token id"))
    require_cuda: bool = _key(_boolean, True)
    gpus: str | tuple[str | int, ...] = _key(
        _one_of(
            _choice("all"),
            _list(_one_of(_integer(0), _text, wanted="an index or a UUID"), "GPUs"),
            wanted='"all" or a list of indices or UUIDs',
        ),
        "all",
    )
    drafter_threads: int = _key(_integer(1), 1)
    target_workers: int = _key(_integer(1), 1)
    target_gpus: int = _key(_integer(1), 1)
    drafter_devices: str | tuple[str, ...] = _key(_devices, "auto")
    target_devices: str | tuple[str, ...] = _key(_devices, "auto")
    dtype: str = _key(_choice("float32", "bfloat16"), "bfloat16")
    target_dtype: str = _key(_choice("float32", "bfloat16"), "bfloat16")
    linear_precision: str = _key(_choice("dtype", "fp8"), "dtype")
    master_weights: str = _key(_choice("float32", "none"), "float32")
    hidden_states: str = _key(_choice(ONLINE, OFFLINE), ONLINE)
    target_forward: str = _key(_choice("graph", "eager"), "graph")
    strategy: str = _key(
        _choice("eager", "default", "reduce-overhead", "reduce-overhead-trees", "whole-step", AUTO), "reduce-overhead"
    )
    block_size: int = _key(_integer(2), 16)
    anchors: int = _key(_integer(1), 512)
    buckets: tuple[int, ...] = _key(_list(_integer(2), "an ascending list of integers >= 2", ascending=True), (3072,))
    batch_size: int = _key(_integer(1), 1)
    accumulation: int = _key(_integer(1), 1)
    draft_layers: int = _key(_integer(1), 5)
    target_layers: str | tuple[int, ...] = _key(
        _one_of(
            _choice("auto"),
            _list(_integer(0), "layer ids", ascending=True),
            wanted='"auto" or an ascending list of layer ids',
        ),
        "auto",
    )
    draft_ffn: int | None = _key(_optional(_integer(1)), None)
    layer_types: str | tuple[str, ...] = _key(
        _one_of(
            _choice("auto"),
            _list(_choice("full_attention", "sliding_attention"), "layer types"),
            wanted='"auto" or a list of full_attention and sliding_attention',
        ),
        "auto",
    )
    sliding_window: int | None = _key(_optional(_integer(2)), None)
    sliding_window_origin: str = _key(_choice("query", "anchor"), "query")
    sliding_window_non_causal: bool = _key(_boolean, False)
    loss_type: str = _key(_choice("dflash", "dpace"), "dflash")
    canary_steps: int = _key(_integer(1), 3)
    rehearsal_steps: int = _key(_integer(1), 3)
    canary_timeout_s: int = _key(_integer(1), 600)
    throughput_check: bool = _key(_boolean, True)

    @property
    def fp8(self) -> bool:
        """Whether linear layers and head multiply 8-bit floats."""
        return self.linear_precision == "fp8"

    @property
    def masters(self) -> bool:
        """Whether the update happens in float32 copies of the drafter's parameters."""
        return self.dtype != "float32" and self.master_weights == "float32"


@dataclass(frozen=True, kw_only=True)
class Training:
    """What the canary's verdict does not depend on; every key as in docs/trainer-contract.md."""

    steps: int = _key(_integer(1))
    learning_rate: float = _key(_number(0, 1, low_open=True), 6e-4)
    warmup_ratio: float = _key(_number(0, 1, high_open=True), 0.04)
    weight_decay: float = _key(_number(0, 1), 0.0)
    betas: tuple[float, float] = _key(_list(_number(0, 1, high_open=True), "two numbers in [0, 1)"), (0.9, 0.95))
    clip: float = _key(_number(0, 1e9, low_open=True), 1.0)
    decay_gamma: float | None = _key(_optional(_number(0, 1e9, low_open=True)), None)
    anchor_eligibility: str = _key(_choice("specforge", "torchspec", "speculators"), "specforge")
    seed: int = _key(_integer(0), 0)
    data: str | None = _key(_optional(_text), None)
    prompts: str | None = _key(_optional(_text), None)
    prompt_field: str = _key(_text, "prompt")
    prompt_count: int = _key(_integer(1), 64)
    bad_prompts: int = _key(_integer(0), 0)
    chat_template_kwargs: Mapping[str, bool | int | float | str] | None = _key(_optional(_variables), None)
    engine: str = _key(_choice("transformers", "openai"), "transformers")
    endpoint: str | None = _key(_optional(_url), None)
    endpoint_model: str | None = _key(_optional(_text), None)
    endpoint_concurrency: int = _key(_integer(1), 16)
    answer_tokens: int = _key(_integer(1), 64)
    answer_batch: int = _key(_integer(1), 16)
    evaluation_prompts: int = _key(_integer(0), 8)
    evaluation_tokens: int = _key(_integer(1), 32)
    evaluate_every: int | None = _key(_optional(_integer(1)), None)
    checkpoint_every: int = _key(_integer(1), 100)
    log_every: int = _key(_integer(1), 1)
    resume_from: str | None = _key(_optional(_text), None)
    init_from: str | None = _key(_optional(_text), None)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One settings file. `prepared` is the folder that `prepare` made; `cache` is where caches may lie."""

    workload: Workload
    training: Training
    cache: Path
    prepared: Path | None = None
    run: str | None = None


def _section(kind: type[_T], value: object, where: str) -> _T:
    if not isinstance(value, dict):
        raise _refuse(value, where, "a table of keys")
    fields = {each.name: each for each in dataclasses.fields(cast("Any", kind))}
    _known(value, fields, where)
    missing = [name for name, each in fields.items() if each.default is dataclasses.MISSING and name not in value]
    if missing:
        raise InputError(f"{missing[0]!r} is missing", where, f"add {missing[0]!r} to {where}")
    read = {name: fields[name].metadata["check"](item, f"{where}.{name}") for name, item in value.items()}
    return kind(**read)


def _known(value: Mapping[object, object], known: Mapping[str, object], where: str) -> None:
    for name in value:
        if name not in known:
            guess = nearest(str(name), known)
            hint = f"did you mean {guess!r}?" if guess else f"the keys are {', '.join(known)}"
            raise InputError(f"unknown key {name!r}", where, hint)


def _together(settings: Settings) -> Settings:
    """What no key can say alone."""
    work, training = settings.workload, settings.training
    for name, count, devices in (
        ("drafter_devices", work.drafter_threads, work.drafter_devices),
        ("target_devices", work.target_workers * work.target_gpus, work.target_devices),
    ):
        if not isinstance(devices, str) and len(devices) != count:
            raise InputError(
                f"{len(devices)} devices for {count} threads", f"workload.{name}", f'give {count} devices or "auto"'
            )
    if work.target_gpus > 1 and work.target_forward != "eager":
        raise InputError(
            f"target_gpus is {work.target_gpus}, and a forward over several GPUs is in no CUDA graph",
            "workload.target_forward",
            "set target_forward: eager",
        )
    _sliding(work)
    if len(training.betas) != 2:
        raise _refuse(list(training.betas), "training.betas", "two numbers in [0, 1)")
    if work.loss_type == "dpace" and training.decay_gamma is not None:
        raise InputError(
            "loss_type is dpace, which makes its own weights", "training.decay_gamma", "leave it out, or take dflash"
        )
    if training.resume_from is not None and training.init_from is not None:
        raise InputError(
            "resume_from is given too, and a run that goes on has its weights already",
            "training.init_from",
            "give one of them",
        )
    if training.evaluate_every is not None and not training.evaluation_prompts:
        raise InputError(
            "nothing is held out that could be judged",
            "training.evaluate_every",
            "give evaluation_prompts of at least 1, or evaluate_every null",
        )
    if (training.engine == "openai") != (training.endpoint is not None):
        raise InputError(
            f"engine {training.engine} and {'an endpoint' if training.endpoint else 'no endpoint'}",
            "training.endpoint",
            "give engine: openai together with the endpoint's URL, or neither",
        )
    if training.data is None and training.evaluation_prompts >= training.prompt_count:
        raise InputError(
            f"{training.evaluation_prompts} of {training.prompt_count} prompts are held out: none is left to train on",
            "training.evaluation_prompts",
            f"give less than prompt_count ({training.prompt_count})",
        )
    return settings


def _sliding(work: Workload) -> None:
    """Layer types and window fit together."""
    window, kinds = work.sliding_window, work.layer_types
    if isinstance(kinds, tuple) and len(kinds) != work.draft_layers:
        raise InputError(
            f"{len(kinds)} layer types for {work.draft_layers} draft layers",
            "workload.layer_types",
            f'give {work.draft_layers} types or "auto"',
        )
    if window is None and "sliding_attention" in kinds:
        raise InputError("sliding layers have no window", "workload.layer_types", "give workload.sliding_window too")
    if window is None:
        return
    if "sliding_attention" not in kinds if isinstance(kinds, tuple) else work.draft_layers == 1:
        raise InputError(
            f"a window of {window}, and no layer is sliding_attention",
            "workload.sliding_window",
            "name the sliding layers in workload.layer_types (auto keeps the last layer full), or leave it out",
        )
    if window < work.block_size:
        raise InputError(
            f"a window of {window} is less than a block of {work.block_size}",
            "workload.sliding_window",
            f"give at least {work.block_size}",
        )


def settings_from_json(value: object) -> Settings:
    """Settings from the decoded file. Raises `InputError`."""
    where = "settings"
    if not isinstance(value, dict):
        raise _refuse(value, where, "a table of keys")
    known: dict[str, object] = dict.fromkeys(("contract", "run", "workload", "training", "prepared", "cache"))
    _known(value, known, where)
    for name in ("contract", "workload", "training", "cache"):
        if name not in value:
            raise InputError(f"{name!r} is missing", where, f"add {name!r}")
    if value["contract"] != CONTRACT:
        raise InputError(
            f"contract {value['contract']!r} is not known to this trainer",
            "settings.contract",
            f"it speaks contract {CONTRACT}",
        )
    prepared = _optional(_text)(value.get("prepared"), "settings.prepared")
    run = _optional(_text)(value.get("run"), "settings.run")
    return _together(
        Settings(
            workload=_section(Workload, value["workload"], "workload"),
            training=_section(Training, value["training"], "training"),
            cache=Path(cast("str", _text(value["cache"], "settings.cache"))),
            prepared=None if prepared is None else Path(cast("str", prepared)),
            run=cast("str | None", run),
        )
    )


def read_settings(path: Path) -> Settings:
    """Settings from a file. Raises `InputError` for a file that is missing, not JSON, or refused."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot read: {error.strerror}", str(path), "give the path of a settings file") from error
    try:
        value = json.loads(text)
    except ValueError as error:
        raise InputError(f"not JSON: {error}", str(path), "see docs/trainer-contract.md for its form") from error
    return settings_from_json(value)
