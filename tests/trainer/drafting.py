"""Small random drafters and batches for the drafter's tests."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from dflash_ops.deploy.collecting import local_manifest
from trainer.anchors import Anchors, block_token_ids, sample_anchors
from trainer.block_mask import dense_block_masks
from trainer.dflash_model import DFlashDrafter, DrafterConfig
from trainer.drafter_config import SlidingWindow

CONFIG = DrafterConfig(
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=6,
    rms_norm_eps=1e-6,
    rope_theta=10000.0,
    vocab_size=40,
    block_size=4,
    num_target_layers=6,
    target_layer_ids=(1, 3),
    mask_token_id=39,
    max_position_embeddings=128,
    tie_word_embeddings=False,
    initializer_range=0.3,
)

COMPILED_CONFIG = DrafterConfig(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=32,
    rms_norm_eps=1e-6,
    rope_theta=1e4,
    vocab_size=500,
    block_size=16,
    num_target_layers=4,
    target_layer_ids=(1, 2),
    mask_token_id=3,
    max_position_embeddings=512,
    tie_word_embeddings=False,
    initializer_range=0.1,
)
"""Large enough that kernels have whole tiles of it."""


def windows(size: int) -> tuple[SlidingWindow | None, ...]:
    """No window, and all four kinds of one of `size` positions."""
    kinds = [(origin, causal) for origin in ("query", "anchor") for causal in (True, False)]
    return (None, *(SlidingWindow(size, origin, causal) for origin, causal in kinds))


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def drafter(seed: int = 0, dtype: torch.dtype = torch.float64, config: DrafterConfig = CONFIG) -> DFlashDrafter:
    """A drafter whose norms are random too, so that a missing one shows."""
    model = DFlashDrafter(config, dtype=dtype, generator=generator(seed))
    numbers = generator(seed + 1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(0.5 + torch.rand(parameter.shape, generator=numbers))
    return model


def brought_home(checkpoint: Path) -> Path:
    """A checkpoint as `dflash-ops collect` leaves it: without `resume/`, and a manifest that does not claim it."""
    shutil.rmtree(checkpoint / "resume")
    manifest = checkpoint / "manifest.json"
    manifest.write_bytes(local_manifest(manifest.read_bytes(), {"config.json", "model.safetensors"}))
    return checkpoint


@dataclass
class Batch:
    input_ids: Tensor
    loss_mask: Tensor
    lengths: Tensor
    target_hidden: Tensor
    embedding: Tensor
    anchors: Anchors
    config: DrafterConfig

    @property
    def masks(self) -> tuple[Tensor, ...]:
        return dense_block_masks(self.config, self.anchors, self.lengths, self.input_ids.shape[1])

    @property
    def block_embeddings(self) -> Tensor:
        ids = block_token_ids(self.input_ids, self.anchors, self.config.block_size, self.config.mask_token_id)
        return self.embedding[ids]


def batch(
    seed: int,
    *,
    rows: int = 2,
    length: int = 14,
    anchors: int = 5,
    block_size: int = 4,
    supervised: float = 0.8,
    window: SlidingWindow | None = None,
    dtype: torch.dtype = torch.float64,
) -> Batch:
    """Random rows, some short; the more `anchors` the more overlap, and blocks hang over the row's end.

    With a `window` the first of the drafter's two layers slides.
    """
    numbers = generator(seed)
    config = replace(CONFIG, block_size=block_size, window=window, sliding_layers=(0,) if window else ())
    lengths = torch.randint(1, length + 1, (rows,), generator=numbers)
    lengths[0] = length
    loss_mask = torch.rand((rows, length), generator=numbers) < supervised
    loss_mask &= torch.arange(length) < lengths[:, None]
    width = config.hidden_size
    return Batch(
        input_ids=torch.randint(0, config.vocab_size - 1, (rows, length), generator=numbers),
        loss_mask=loss_mask,
        lengths=lengths,
        target_hidden=torch.randn((rows, length, 2 * width), generator=numbers, dtype=torch.float64).to(dtype),
        embedding=torch.randn((config.vocab_size, width), generator=numbers, dtype=torch.float64).to(dtype),
        anchors=sample_anchors(loss_mask, lengths, anchors, numbers),
        config=config,
    )
