"""Checkpoints: built as `.part`, fsynced, described by a manifest, renamed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from . import files
from .errors import InputError
from .model import Parameters, Shape
from .optimizer import AdamW
from .safetensors_file import pack, unpack
from .settings import Training
from .target import Target

ROLES = {"model.safetensors": "weights", "config.json": "config"}


def save(out: Path, step: int, shape: Shape, parameters: Parameters, optimizer: AdamW) -> Path:
    """Write `checkpoints/step-NNNNNN`; returns the folder."""
    final = out / "checkpoints" / f"step-{step:06d}"
    part = final.with_name(final.name + ".part")
    if final.exists():
        raise FileExistsError(f"{final} is already complete")
    if part.exists():
        shutil.rmtree(part)
    (part / "resume").mkdir(parents=True)
    sizes = shape.parameters()
    config = {
        "architectures": ["TinyDrafter"],
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.width,
        "block_size": shape.block_size,
        "mask_token_id": shape.mask,
    }
    files.write_bytes(part / "model.safetensors", pack(parameters, sizes, "F32"))
    files.write_json(part / "config.json", config)
    # doubles, so that a resumed run has the very bits of one that never stopped
    state: Parameters = {}
    for kind, values in (("master", parameters), ("first", optimizer.first), ("second", optimizer.second)):
        state.update({f"{kind}.{name}": values[name] for name in values})
    shapes = {name: sizes[name.partition(".")[2]] for name in state}
    files.write_bytes(part / "resume" / "optimizer.safetensors", pack(state, shapes, "F64"))
    files.write_json(part / "resume" / "state.json", {"step": step})
    _write_manifest(part, step)
    files.fsync_folder(part / "resume")
    files.fsync_folder(part)
    part.replace(final)
    files.fsync_folder(final.parent)
    return final


def _write_manifest(part: Path, step: int) -> None:
    listed = [
        {
            "path": path.relative_to(part).as_posix(),
            "size": path.stat().st_size,
            "sha256": files.sha256(path),
            "role": ROLES.get(path.name, "resume"),
        }
        for path in sorted(part.rglob("*"))
        if path.is_file()
    ]
    manifest = {"v": 1, "kind": "checkpoint", "step": step, "files": listed}
    files.write_json(part / "manifest.json", manifest)


def verify(folder: Path, where: str, *, resumable: bool = True) -> dict[str, Any]:
    """Return the manifest of a complete checkpoint whose files are as it says; otherwise `InputError`.

    Not `resumable`: what only a resumed run needs may be missing.
    """
    fix = "give a complete checkpoint"
    try:
        manifest: dict[str, Any] = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"no complete checkpoint: {error}", f"{where}: {folder}", fix) from error
    for entry in manifest["files"]:
        if entry["role"] == "resume" and not resumable:
            continue
        path = folder / entry["path"]
        if not path.is_file() or files.sha256(path) != entry["sha256"]:
            raise InputError(f"{entry['path']} is not what the manifest says", f"{where}: {folder}", fix)
    return manifest


def load(folder: Path, target: Target, where: str) -> tuple[Shape, Parameters]:
    """Load the weights (as they were stored, F32) and check them against the config and the target."""
    verify(folder, where, resumable=False)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    shape = Shape(config["vocab_size"], config["hidden_size"], config["block_size"], config["mask_token_id"])
    tensors, shapes = unpack(folder / "model.safetensors")
    wrong = shapes != shape.parameters()
    if wrong or (shape.vocabulary, shape.width) != (len(target.tokens), target.width):
        raise InputError("the checkpoint does not fit", f"{where}: {folder}", "use its own target and sizes")
    return shape, tensors


def load_first(folder: Path, shape: Shape) -> Parameters:
    """Return the weights of a checkpoint with the same shape, for a run that begins with them."""
    where = "training.init_from"
    verify(folder, where, resumable=False)
    tensors, shapes = unpack(folder / "model.safetensors")
    if shapes != shape.parameters():
        raise InputError("the checkpoint has other sizes", f"{where}: {folder}", "use its own workload")
    return tensors


def load_resume(folder: Path, shape: Shape, training: Training) -> tuple[int, Parameters, AdamW]:
    """Return (step, parameters, optimiser) exactly as they were when the checkpoint was written."""
    where = "training.resume_from"
    verify(folder, where)
    state, shapes = unpack(folder / "resume" / "optimizer.safetensors")
    parts: dict[str, Parameters] = {"master": {}, "first": {}, "second": {}}
    for name, values in state.items():
        kind, _, parameter = name.partition(".")
        parts[kind][parameter] = values
    if {name[len("master.") :]: shapes[name] for name in shapes if name[0] == "m"} != shape.parameters():
        raise InputError("the checkpoint has other sizes", f"{where}: {folder}", "resume with its own workload")
    step = int(json.loads((folder / "resume" / "state.json").read_text(encoding="utf-8"))["step"])
    if step >= training.steps:
        fix = f"set training.steps above {step}"
        raise InputError(f"the checkpoint is at step {step} of {training.steps}", where, fix)
    optimizer = AdamW(training, parts["first"], parts["second"], step)
    return step, parts["master"], optimizer
