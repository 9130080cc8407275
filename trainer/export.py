"""The `export` verb: a checkpoint in the speculators format, which vLLM serves by its folder alone.

    DIR/
      config.json          `speculators_format.py`
      model.safetensors    the drafter's tensors, and the target's embedding and head
      manifest.json        last; size and sha256 of the others, and which checkpoint it was made from

Embedding and head are stored although speculators 0.9.0 takes them from the target again: earlier versions, and
readers that know no target, do not.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from trainer.assets import resolve_asset
from trainer.checkpoint import MANIFEST, load_checkpoint, save_tensors
from trainer.errors import InputError
from trainer.facts import refuse_other_drafter, target_facts
from trainer.files import fsync_dir, sha256_file, write_json
from trainer.serving_layout import (
    CONFIG,
    WEIGHTS,
    CheckpointError,
    check_tensors,
    expected_shapes,
    load_tensors,
    read_object,
    refuse_other_bits,
)
from trainer.settings import Settings
from trainer.speculators_format import EMBEDDING, HEAD, serving_config, speculators_config
from trainer.target_files import target_folder
from trainer.target_weights import embedding_and_head

log = logging.getLogger(__name__)

_ROLES = {WEIGHTS: "weights", CONFIG: "config"}


def export(settings: Settings, checkpoint: Path, verifier: str | None, out: Path) -> None:
    """Write the folder `out` in the speculators format; it appears whole, by a rename, or not at all.

    `verifier`: by what name a server finds the target; None: the folder that the settings name (of a GGUF file, what it
    was converted to). Raises InputError for an `out` that holds something, a checkpoint that is not whole or not of
    these settings, and a drafter that the format cannot say.
    """
    out = out.absolute()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError("there is something already", str(out), "give a new or empty folder")
    facts = target_facts(settings)
    drafter, weights = load_checkpoint(checkpoint, resumable=False)
    refuse_other_drafter(drafter, facts.drafter, "--checkpoint")
    if drafter.reads_last_target_layer:
        raise InputError(
            f"target layer {drafter.target_layer_ids[-1]} is the last one, whose state means another thing in vLLM",
            "--checkpoint",
            "train with target_layers below it",
        )
    folder = target_folder(resolve_asset(settings.workload.target, "workload.target"), settings.cache).absolute()
    embedding, head = embedding_and_head(folder, facts.config)
    dtype = weights["fc.weight"].dtype
    tensors = {**weights, EMBEDDING: embedding.to(dtype), HEAD: head.to(dtype)}
    name = str(folder) if verifier is None else verifier
    part = out.with_name(out.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    save_tensors(part / WEIGHTS, tensors)
    serving = read_object(checkpoint / CONFIG)
    write_json(part / CONFIG, speculators_config(serving, name, facts.config.architectures or []))
    try:
        if read_export(part, drafter.num_target_layers)[0] != serving:
            raise CheckpointError("it reads back as another drafter", str(part / CONFIG), "the writer is at fault")
        refuse_other_bits(part / WEIGHTS, tensors)
    except CheckpointError:
        shutil.rmtree(part)
        raise
    write_json(part / MANIFEST, _manifest(part, checkpoint))
    fsync_dir(part)
    # over an empty folder too
    part.rename(out)
    fsync_dir(out.parent)
    log.info("%s holds the drafter, for a server that finds its target at %s", out, name)


def read_export(folder: Path, num_target_layers: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The serving config and all tensors (on the CPU) of a folder in the speculators format.

    Judged as `serving_layout` judges a checkpoint; the format does not say how many layers the target has. Raises
    CheckpointError.
    """
    config = serving_config(read_object(folder / CONFIG), num_target_layers, str(folder / CONFIG))
    shared = (config["vocab_size"], config["hidden_size"])
    dtype = check_tensors(folder / WEIGHTS, {**expected_shapes(config), EMBEDDING: shared, HEAD: shared})
    if config["dtype"] != dtype:
        raise CheckpointError(
            f"dtype is {config['dtype']!r}, the tensors are {dtype}", str(folder / CONFIG), "they must agree"
        )
    return config, load_tensors(folder / WEIGHTS)


def _manifest(part: Path, checkpoint: Path) -> Mapping[str, Any]:
    files = [
        {"path": path, "size": (part / path).stat().st_size, "sha256": sha256_file(part / path), "role": role}
        for path, role in _ROLES.items()
    ]
    made_from = read_object(checkpoint / MANIFEST)
    digest = next(each["sha256"] for each in made_from["files"] if each["path"] == WEIGHTS)
    return {
        "v": 1,
        "kind": "export",
        "format": "speculators",
        "step": made_from["step"],
        "made_from": {"weights_sha256": digest},
        "files": files,
    }
