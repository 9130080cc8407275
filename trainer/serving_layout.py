"""A drafter's folder as serving engines read it: `config.json` and `model.safetensors`, by the serving contract alone.

Nothing here knows the model's code or what wrote the folder, and what is judged is the files, not a state in memory.
That matters because engines are quiet: SGLang (`models/dflash.py`) skips names that it does not know, leaves missing
ones unset and raises for the shape of `fc.weight` alone; vLLM (`qwen3_dflash.py`) decides by keys of the config
what a layer sees. So every name, shape, dtype and value must be right, and a key that nobody asked for is refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from trainer.errors import InputError, nearest

WEIGHTS, CONFIG = "model.safetensors", "config.json"
_DTYPES = {"F32": "float32", "BF16": "bfloat16"}
_FULL, _SLIDING = "full_attention", "sliding_attention"


class CheckpointError(InputError):
    """A checkpoint cannot be written, or what was read is not whole: what, where, and what would do."""


def check_serving_layout(folder: Path) -> dict[str, Any]:
    """The `config.json` of a folder in the layout that SGLang and vLLM load, when all of the folder is right.

    Of the tensors only the file's header is read. Raises CheckpointError.
    """
    config = read_object(folder / CONFIG)
    check_config(config, str(folder / CONFIG))
    dtype = check_tensors(folder / WEIGHTS, expected_shapes(config))
    if (config["dtype"], config["torch_dtype"]) != (dtype, dtype):
        raise CheckpointError(
            f"dtype is {config['dtype']!r}, torch_dtype {config['torch_dtype']!r}, and the tensors are {dtype}",
            str(folder / CONFIG),
            "they must agree",
        )
    return config


def expected_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor that an engine loads for a `config.json`, by name: 11 a layer and 3 more (58 for 5 layers)."""
    width, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (width, len(config["dflash_config"]["target_layer_ids"]) * width),
        "hidden_norm.weight": (width,),
        "norm.weight": (width,),
    }
    for layer in range(config["num_hidden_layers"]):
        for name, shape in {
            "input_layernorm": (width,),
            "post_attention_layernorm": (width,),
            "self_attn.q_proj": (queries, width),
            "self_attn.k_proj": (keys, width),
            "self_attn.v_proj": (keys, width),
            "self_attn.o_proj": (width, queries),
            "self_attn.q_norm": (dim,),
            "self_attn.k_norm": (dim,),
            "mlp.gate_proj": (inner, width),
            "mlp.up_proj": (inner, width),
            "mlp.down_proj": (width, inner),
        }.items():
            shapes[f"layers.{layer}.{name}.weight"] = shape
    return shapes


_Rule = Callable[[object], bool]


def _is_int(low: int) -> _Rule:
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= low


def _positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0


def _only(wanted: object) -> _Rule:
    # 0 == False in Python, and not in JSON
    return lambda value: value == wanted and isinstance(value, bool) == isinstance(wanted, bool)


_COUNT = (_is_int(1), "an integer >= 1")
_NUMBER = (_positive, "a number > 0")
_FLAG = (lambda value: isinstance(value, bool), "true or false")
_TEXT = (lambda value: isinstance(value, str), "a text")
_FALSE = (_only(False), "false")
_CONFIG_KEYS: dict[str, tuple[_Rule, str]] = {
    "architectures": (_only(["DFlashDraftModel"]), '["DFlashDraftModel"]'),
    "model_type": (_only("qwen3"), '"qwen3"'),
    "block_size": (_is_int(2), "an integer >= 2"),
    "num_target_layers": _COUNT,
    "hidden_size": _COUNT,
    "intermediate_size": _COUNT,
    "num_hidden_layers": _COUNT,
    "num_attention_heads": _COUNT,
    "num_key_value_heads": _COUNT,
    "head_dim": _COUNT,
    "hidden_act": (_only("silu"), '"silu"'),
    "rms_norm_eps": _NUMBER,
    "rope_theta": _NUMBER,
    "rope_scaling": (_only(None), "null"),
    "max_position_embeddings": _COUNT,
    "vocab_size": _COUNT,
    "attention_bias": _FALSE,
    "attention_dropout": (_only(0.0), "0.0"),
    "initializer_range": _NUMBER,
    "tie_word_embeddings": _FLAG,
    "layer_types": (lambda value: isinstance(value, list), "a list"),
    "sliding_window": (lambda value: value is None or _is_int(1)(value), "an integer >= 1 or null"),
    "use_sliding_window": _FLAG,
    "max_window_layers": _COUNT,
    "dtype": _TEXT,
    "torch_dtype": _TEXT,
    "dflash_config": (lambda value: isinstance(value, dict), "a table of keys"),
}
_OPTIONAL_KEYS = {"is_causal": _FALSE}
_DFLASH_KEYS: dict[str, tuple[_Rule, str]] = {
    "mask_token_id": (_is_int(0), "an integer >= 0"),
    "target_layer_ids": (lambda value: isinstance(value, list) and all(map(_is_int(0), value)), "a list of layer ids"),
}
_OPTIONAL_DFLASH_KEYS = {
    "block_size": (_is_int(2), "an integer >= 2"),
    "causal": _FALSE,
    "sliding_window_origin": (lambda value: value in ("query", "anchor"), '"query" or "anchor"'),
}


def check_config(config: Mapping[str, Any], where: str) -> None:
    """Raise CheckpointError unless these are the keys and values of the serving contract, and fit together."""
    _check_keys(config, _CONFIG_KEYS, _OPTIONAL_KEYS, where, "")
    dflash = config["dflash_config"]
    _check_keys(dflash, _DFLASH_KEYS, _OPTIONAL_DFLASH_KEYS, where, "dflash_config.")
    heads, key_heads, layers = (
        config[key] for key in ("num_attention_heads", "num_key_value_heads", "num_hidden_layers")
    )
    ids, kinds = dflash["target_layer_ids"], config["layer_types"]
    sliding = _SLIDING in kinds
    for right, what, fix in (
        (
            dflash.get("block_size", config["block_size"]) == config["block_size"],
            f"block_size is {config['block_size']}, dflash_config.block_size {dflash.get('block_size')}",
            "SGLang reads dflash_config first: the two must be equal",
        ),
        (heads % key_heads == 0, f"{heads} heads, {key_heads} key heads", "the heads must divide among the key heads"),
        (config["head_dim"] % 2 == 0, f"head_dim {config['head_dim']}", "rotary positions pair the halves of a head"),
        (
            dflash["mask_token_id"] < config["vocab_size"],
            f"mask_token_id {dflash['mask_token_id']}, and a vocabulary of {config['vocab_size']}",
            "the mask must be a token of the target",
        ),
        (
            ids and ids == sorted(set(ids)) and ids[-1] < config["num_target_layers"],
            f"target_layer_ids {ids} of {config['num_target_layers']} target layers",
            "ascending and distinct layers of the target are needed",
        ),
        (
            len(kinds) == layers and all(kind in (_FULL, _SLIDING) for kind in kinds),
            f"layer_types {kinds} for {layers} layers",
            f"{_FULL!r} or {_SLIDING!r} for each layer is needed",
        ),
        (
            config["use_sliding_window"] == sliding and (config["sliding_window"] is not None) == sliding,
            f"use_sliding_window is {config['use_sliding_window']}, sliding_window {config['sliding_window']}, "
            f"layer_types {kinds}",
            "sliding layers need both, and nothing else does",
        ),
        (
            ("is_causal" in config) == ("causal" in dflash),
            f"is_causal is {config.get('is_causal')}, dflash_config.causal {dflash.get('causal')}",
            "vLLM reads either: both are needed, or none",
        ),
    ):
        if not right:
            raise CheckpointError(what, where, fix)


def _check_keys(
    table: Mapping[str, Any],
    required: Mapping[str, tuple[_Rule, str]],
    optional: Mapping[str, tuple[_Rule, str]],
    where: str,
    prefix: str,
) -> None:
    for key in required:
        if key not in table:
            raise CheckpointError(f"{prefix}{key} is missing", where, f"{required[key][1]} is needed")
    rules = {**required, **optional}
    for key, value in table.items():
        if key not in rules:
            like = nearest(key, rules)
            hint = f"is it {like}?" if like else "an engine may read it: only the contract's keys may be"
            raise CheckpointError(f"{prefix}{key} is not in the contract", where, hint)
        rule, wanted = rules[key]
        if not rule(value):
            raise CheckpointError(f"{prefix}{key} is {json.dumps(value)}", where, f"{wanted} is needed")


def check_tensors(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> str:
    """The one dtype of a safetensors file that holds exactly these tensors. Raises CheckpointError."""
    found = read_header(path)
    refuse_other_names(found, shapes, str(path))
    for name, shape in shapes.items():
        if found[name][0] != shape:
            raise CheckpointError(f"{name} is {found[name][0]}", str(path), f"its shape must be {shape}")
    kinds = {dtype for _, dtype in found.values()}
    if len(kinds) != 1 or not kinds <= set(_DTYPES.values()):
        raise CheckpointError(
            f"the tensors are {', '.join(sorted(kinds))}",
            str(path),
            f"one of {', '.join(_DTYPES.values())} for all is needed",
        )
    return kinds.pop()


def refuse_other_names(found: Iterable[str], shapes: Mapping[str, tuple[int, ...]], where: str) -> None:
    """Raise CheckpointError unless the names are exactly those of `shapes`."""
    names = set(found)
    for name in shapes.keys() - names:
        like = nearest(name, names - shapes.keys(), cutoff=0.8)
        raise CheckpointError(f"{name} is missing", where, f"is it {like}?" if like else f"{shapes[name]} needed")
    for name in names - shapes.keys():
        raise CheckpointError(f"{name} is not in the contract", where, f"only its {len(shapes)} tensors may be")


def refuse_other_bits(path: Path, state: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError where a stored tensor is not, bit for bit, the one of its name in `state` (any device)."""
    with _opened(path) as stored:
        for name, tensor in state.items():
            kept, wanted = stored.get_tensor(name), tensor.detach().cpu().contiguous()
            # as bytes: a NaN is not equal to itself
            if kept.dtype != wanted.dtype or not torch.equal(
                kept.flatten().view(torch.uint8), wanted.flatten().view(torch.uint8)
            ):
                raise CheckpointError(
                    f"{name} is not in the file as it is in memory", str(path), "the disk or the writer is at fault"
                )


def read_header(path: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype (torch's name) of every tensor of a safetensors file. Raises CheckpointError."""
    found = {}
    with _opened(path) as stored:
        for name in stored.keys():  # noqa: SIM118 -- not a mapping
            piece = stored.get_slice(name)
            kind = piece.get_dtype()
            found[name] = (tuple(piece.get_shape()), _DTYPES.get(kind, kind))
    return found


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Every tensor of a safetensors file, on the CPU. Raises CheckpointError."""
    with _opened(path) as stored:
        return {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118 -- not a mapping


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as wrong:
        raise CheckpointError(f"unreadable: {wrong}", str(path), "take another checkpoint") from None


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises CheckpointError."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as wrong:
        raise CheckpointError(f"unreadable: {wrong}", str(path), "take another checkpoint") from None
    if not isinstance(data, dict):
        raise CheckpointError("not a JSON object", str(path), "take another checkpoint")
    return cast("dict[str, Any]", data)
