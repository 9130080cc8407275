"""Checkpoints: the layout that SGLang and vLLM load, a manifest, and what a resumed run needs.

    step-000080/
      config.json          the drafter's config
      model.safetensors    11 tensors a layer and 3 more, without prefix; no embedding, no head
      resume/optimizer.safetensors, resume/state.json
      manifest.json        last; size and sha256 of all the others

Names and shapes come from the serving contract (`expected_shapes`), not from the model's code. SGLang ignores
unknown and missing names without a word, so they are checked before writing and after reading.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from trainer.drafter_config import DrafterConfig
from trainer.errors import InputError, nearest
from trainer.files import fsync_dir, sha256_file, write_json

WEIGHTS, CONFIG, MANIFEST = "model.safetensors", "config.json", "manifest.json"
RESUME_TENSORS, RESUME_STATE = "resume/optimizer.safetensors", "resume/state.json"
_ROLES = {WEIGHTS: "weights", CONFIG: "config", RESUME_TENSORS: "resume", RESUME_STATE: "resume"}
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


class CheckpointError(InputError):
    """A checkpoint cannot be written, or what was read is not whole: what, where, and what would do."""


@dataclass(frozen=True)
class Resume:
    """What a run needs besides the weights: named tensors, and plain values that JSON can hold."""

    tensors: dict[str, Tensor]
    state: dict[str, Any]


def expected_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that a serving engine loads, by name: 11 a layer and 3 more (58 for 5 layers)."""
    width, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_attention_heads * dim, config.num_key_value_heads * dim
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (width, len(config.target_layer_ids) * width),
        "hidden_norm.weight": (width,),
        "norm.weight": (width,),
    }
    for layer in range(config.num_hidden_layers):
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


def save_checkpoint(
    out: Path, step: int, drafter_state: Mapping[str, Tensor], config: DrafterConfig, resume: Mapping[str, Any]
) -> Path:
    """Write `out/step-NNNNNN` and return it. It appears whole, by a rename, or not at all.

    `drafter_state` is the drafter's state_dict, on any device. `resume` maps flat names to tensors (kept in
    resume/optimizer.safetensors) or to values that JSON can hold (resume/state.json). A stale `.part`
    folder of the same step is replaced. Raises CheckpointError where the step is already there, or names,
    shapes or dtypes are not what serving engines load.
    """
    final = out / f"step-{step:06d}"
    if final.exists():
        raise CheckpointError(
            "this step has a checkpoint already", str(final), "a complete checkpoint is never replaced: move it"
        )
    dtype = _check_tensors(drafter_state, config, "the drafter's state")
    part = final.with_name(final.name + ".part")
    if part.exists():
        shutil.rmtree(part)
    (part / "resume").mkdir(parents=True)
    _save_tensors(part / WEIGHTS, drafter_state)
    write_json(part / CONFIG, config.to_json(dtype))
    tensors = {name: value for name, value in resume.items() if isinstance(value, Tensor)}
    _save_tensors(part / RESUME_TENSORS, tensors)
    write_json(part / RESUME_STATE, {name: value for name, value in resume.items() if name not in tensors})
    files = [
        {"path": path, "size": (part / path).stat().st_size, "sha256": sha256_file(part / path), "role": role}
        for path, role in _ROLES.items()
    ]
    write_json(part / MANIFEST, {"v": 1, "kind": "checkpoint", "step": step, "files": files})
    fsync_dir(part / "resume")
    fsync_dir(part)
    part.rename(final)
    fsync_dir(out)
    return final


def load_checkpoint(path: Path, *, resumable: bool = True) -> tuple[DrafterConfig, dict[str, Tensor]]:
    """The config and the tensors (on the CPU) of a complete checkpoint.

    Every file's size and sha256, every tensor's name, shape and dtype is checked. Not `resumable`: what only a
    resumed run needs may be missing, as in a checkpoint that was brought home. Raises CheckpointError.
    """
    _verify_files(path, resumable=resumable)
    config_path = path / CONFIG
    data = _read_object(config_path)
    try:
        config = DrafterConfig.from_json(data)
    except InputError as wrong:
        raise CheckpointError(wrong.what, f"{config_path}: {wrong.where}", wrong.fix) from None
    state = _load_tensors(path / WEIGHTS)
    dtype = _check_tensors(state, config, str(path / WEIGHTS))
    if data.get("dtype") != dtype or data.get("torch_dtype", dtype) != dtype:
        raise CheckpointError(
            f"dtype is {data.get('dtype')!r} and the tensors are {dtype}", str(config_path), "they must agree"
        )
    return config, state


def load_resume(path: Path) -> Resume:
    """What `save_checkpoint` was given as `resume`, from a complete checkpoint. Raises CheckpointError."""
    _verify_files(path)
    return Resume(_load_tensors(path / RESUME_TENSORS), _read_object(path / RESUME_STATE))


def _check_tensors(state: Mapping[str, Tensor], config: DrafterConfig, where: str) -> str:
    """Names, shapes and one dtype as serving engines expect; returns the dtype's name."""
    shapes = expected_shapes(config)
    for name in shapes.keys() - state.keys():
        like = nearest(name, state.keys() - shapes.keys(), cutoff=0.8)
        raise CheckpointError(f"{name} is missing", where, f"is it {like}?" if like else f"{shapes[name]} needed")
    for name in state.keys() - shapes.keys():
        raise CheckpointError(f"{name} is not in the contract", where, f"only its {len(shapes)} tensors may be")
    for name, shape in shapes.items():
        if tuple(state[name].shape) != shape:
            raise CheckpointError(f"{name} is {tuple(state[name].shape)}", where, f"its shape must be {shape}")
    names = {str(tensor.dtype).removeprefix("torch.") for tensor in state.values()}
    if len(names) != 1 or not names <= _DTYPES.keys():
        raise CheckpointError(
            f"the tensors are {', '.join(sorted(names))}", where, f"one of {', '.join(_DTYPES)} for all is needed"
        )
    return names.pop()


def _save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors, each with storage of its own, and flush them to the disk."""
    # clones only where needed: safetensors refuses views that share storage
    copies = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    seen: set[int] = set()
    for name, tensor in copies.items():
        start = tensor.untyped_storage().data_ptr()
        if start in seen:
            copies[name] = tensor.clone()
        seen.add(start)
    save_file(copies, path, metadata={"format": "pt"})
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _load_tensors(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt") as stored:
            return {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118 -- not a mapping
    except (SafetensorError, OSError) as wrong:
        raise CheckpointError(f"unreadable: {wrong}", str(path), "take another checkpoint") from None


def _read_object(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as wrong:
        raise CheckpointError(f"unreadable: {wrong}", str(path), "take another checkpoint") from None
    if not isinstance(data, dict):
        raise CheckpointError("not a JSON object", str(path), "take another checkpoint")
    return cast("dict[str, Any]", data)


def _verify_files(path: Path, *, resumable: bool = True) -> None:
    """The manifest names exactly the files that there must be, and each is what it says."""
    if not (path / MANIFEST).is_file():
        raise CheckpointError(
            f"no {MANIFEST}", str(path), "a complete checkpoint is a folder like step-000080 that has one"
        )
    manifest = _read_object(path / MANIFEST)
    if manifest.get("v") != 1 or manifest.get("kind") != "checkpoint":
        raise CheckpointError(
            f"v {manifest.get('v')!r}, kind {manifest.get('kind')!r}",
            str(path / MANIFEST),
            "version 1 of kind 'checkpoint' is needed",
        )
    entries = manifest.get("files")
    fields = {"path": str, "size": int, "sha256": str, "role": str}
    if not isinstance(entries, list) or not all(
        isinstance(entry, dict) and all(isinstance(entry.get(key), kind) for key, kind in fields.items())
        for entry in entries
    ):
        raise CheckpointError(
            "files is not a list of path, size, sha256, role", str(path / MANIFEST), "take another checkpoint"
        )
    for entry in entries:
        pure = PurePosixPath(entry["path"])
        if pure.is_absolute() or ".." in pure.parts:
            raise CheckpointError(
                f"{entry['path']} leaves the checkpoint", str(path / MANIFEST), "paths are relative to it"
            )
        if resumable or entry["role"] != "resume":
            _verify_file(path / pure, entry["size"], entry["sha256"])
    roles = {entry["path"]: entry["role"] for entry in entries}
    if roles != _ROLES:
        raise CheckpointError(
            f"it names {', '.join(f'{name} ({role})' for name, role in sorted(roles.items()))}",
            str(path / MANIFEST),
            f"exactly {', '.join(f'{name} ({role})' for name, role in sorted(_ROLES.items()))} are needed",
        )


def _verify_file(path: Path, size: int, sha256: str) -> None:
    if not path.is_file():
        raise CheckpointError("missing", str(path), "collect the checkpoint again")
    if path.stat().st_size != size:
        raise CheckpointError(
            f"{path.stat().st_size} bytes, the manifest says {size}", str(path), "collect the checkpoint again"
        )
    if sha256_file(path) != sha256:
        raise CheckpointError("its sha256 is not the manifest's", str(path), "collect the checkpoint again")
