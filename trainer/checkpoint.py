"""Checkpoints: the layout that SGLang and vLLM load, a manifest, and what a resumed run needs.

    step-000080/
      config.json          the drafter's config
      model.safetensors    11 tensors a layer and 3 more, without prefix; no embedding, no head
      resume/optimizer.safetensors, resume/state.json
      manifest.json        last; size and sha256 of all the others

The files that were written are read back by the serving contract (`serving_layout.py`) before the folder gets its name,
and compared bit for bit with the drafter in memory.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from trainer.drafter_config import DrafterConfig
from trainer.errors import InputError
from trainer.files import fsync_dir, fsync_file, sha256_file, write_json
from trainer.serving_layout import (
    CONFIG,
    WEIGHTS,
    CheckpointError,
    check_serving_layout,
    load_tensors,
    read_object,
    refuse_other_bits,
)

MANIFEST = "manifest.json"
RESUME_TENSORS, RESUME_STATE = "resume/optimizer.safetensors", "resume/state.json"
_ROLES = {WEIGHTS: "weights", CONFIG: "config", RESUME_TENSORS: "resume", RESUME_STATE: "resume"}


@dataclass(frozen=True)
class Resume:
    """What a run needs besides the weights: named tensors, and plain values that JSON can hold."""

    tensors: dict[str, Tensor]
    state: dict[str, Any]


def save_checkpoint(
    out: Path, step: int, drafter_state: Mapping[str, Tensor], config: DrafterConfig, resume: Mapping[str, Any]
) -> Path:
    """Write `out/step-NNNNNN` and return it. It appears whole, by a rename, or not at all.

    `drafter_state` is the drafter's state_dict, on any device. `resume` maps flat names to tensors (kept in
    resume/optimizer.safetensors) or to values that JSON can hold (resume/state.json). A stale `.part`
    folder of the same step is replaced. Raises CheckpointError where the step is already there, or names,
    shapes, dtypes or values of the files written are not what serving engines load, or not the drafter's.
    """
    final = out / f"step-{step:06d}"
    if final.exists():
        raise CheckpointError(
            "this step has a checkpoint already", str(final), "a complete checkpoint is never replaced: move it"
        )
    part = final.with_name(final.name + ".part")
    if part.exists():
        shutil.rmtree(part)
    (part / "resume").mkdir(parents=True)
    save_tensors(part / WEIGHTS, drafter_state)
    dtypes = [str(tensor.dtype).removeprefix("torch.") for tensor in drafter_state.values()]
    write_json(part / CONFIG, config.to_json(dtypes[0]))
    try:
        if _read_config(part) != config:
            raise CheckpointError(
                "it reads back as another drafter", str(part / CONFIG), "this is a fault of the trainer"
            )
        refuse_other_bits(part / WEIGHTS, drafter_state)
    except CheckpointError:
        shutil.rmtree(part)
        raise
    tensors = {name: value for name, value in resume.items() if isinstance(value, Tensor)}
    save_tensors(part / RESUME_TENSORS, tensors)
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
    return _read_config(path), load_tensors(path / WEIGHTS)


def load_resume(path: Path) -> Resume:
    """What `save_checkpoint` was given as `resume`, from a complete checkpoint. Raises CheckpointError."""
    _verify_files(path)
    return Resume(load_tensors(path / RESUME_TENSORS), read_object(path / RESUME_STATE))


def _read_config(folder: Path) -> DrafterConfig:
    """The drafter that a folder in the serving layout holds. Raises CheckpointError where anything in it is wrong."""
    data = check_serving_layout(folder)
    try:
        return DrafterConfig.from_json(data)
    except InputError as wrong:
        raise CheckpointError(wrong.what, f"{folder / CONFIG}: {wrong.where}", wrong.fix) from None


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
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
    fsync_file(path)


def _verify_files(path: Path, *, resumable: bool = True) -> None:
    """The manifest names exactly the files that there must be, and each is what it says."""
    if not (path / MANIFEST).is_file():
        raise CheckpointError(
            f"no {MANIFEST}", str(path), "a complete checkpoint is a folder like step-000080 that has one"
        )
    manifest = read_object(path / MANIFEST)
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
    # the manifest of one that was brought home claims only what came
    roles = {entry["path"]: entry["role"] for entry in entries if resumable or entry["role"] != "resume"}
    needed = {name: role for name, role in _ROLES.items() if resumable or role != "resume"}
    if roles != needed:
        raise CheckpointError(
            f"it names {', '.join(f'{name} ({role})' for name, role in sorted(roles.items()))}",
            str(path / MANIFEST),
            f"exactly {', '.join(f'{name} ({role})' for name, role in sorted(needed.items()))} are needed",
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
