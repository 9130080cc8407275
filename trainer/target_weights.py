"""The two tensors of a target that a drafter shares with it, read without loading the rest."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from trainer.errors import InputError
from trainer.serving_layout import read_object

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class SharedWeights:
    """Embedding and head [V, D]; the same tensor where the target ties them. `target.Target` has them too."""

    embed_weight: Tensor
    head_weight: Tensor


def shared_weights(folder: Path, config: Any, dtype: torch.dtype) -> SharedWeights:
    """What a target that was loaded in `dtype` would share, on the CPU. Raises as `embedding_and_head`."""
    embedding, head = embedding_and_head(folder, config)
    # a copy: what is mapped from the file is read from there once
    embed = embedding.to(dtype, copy=True)
    return SharedWeights(embed, embed if head is embedding else head.to(dtype, copy=True))


def embedding_and_head(folder: Path, config: Any) -> tuple[Tensor, Tensor]:
    """Embedding and head [V, D] of a transformers folder, in its own dtype; one tensor twice where they are tied.

    `config` is the target's transformers config. Raises InputError where they are not in the folder, or not [V, D].
    """
    embedding = _read(folder, _EMBEDDING)
    head = embedding if config.tie_word_embeddings else _read(folder, _HEAD)
    wanted = (config.vocab_size, config.hidden_size)
    for name, tensor in ((_EMBEDDING, embedding), (_HEAD, head)):
        if tuple(tensor.shape) != wanted:
            raise InputError(f"{name} is {tuple(tensor.shape)}", str(folder), f"its config says {wanted}")
    return embedding, head


def _read(folder: Path, name: str) -> Tensor:
    shard = _SINGLE
    if (folder / _INDEX).is_file():
        shard = read_object(folder / _INDEX).get("weight_map", {}).get(name, shard)
    try:
        with safe_open(folder / shard, framework="pt") as stored:
            tensor: Tensor = stored.get_tensor(name)
            return tensor
    except (SafetensorError, OSError) as wrong:
        raise InputError(
            f"{name} cannot be read: {wrong}", str(folder / shard), "a target saved with save_pretrained is needed"
        ) from None
