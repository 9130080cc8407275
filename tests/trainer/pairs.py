"""A random target, as the trainer wraps it, and a random drafter for it."""

from __future__ import annotations

from collections.abc import Collection

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from trainer.dflash_model import DFlashDrafter, create_drafter_config
from trainer.target import Target


def tiny_pair(
    *,
    dtype: torch.dtype = torch.float32,
    block_size: int = 5,
    eos_ids: Collection[int] = (),
    seed: int = 0,
    kind: type[Target] = Target,
) -> tuple[Target, DFlashDrafter]:
    """Hidden size 32, 60 tokens; the target's greedy text wanders. Token 59 is the mask."""
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=60,
        max_position_embeddings=256,
        initializer_range=0.3,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).to(dtype)
    shape = create_drafter_config(
        config, draft_layers=1, block_size=block_size, mask_token_id=59, target_layer_ids=[0, 2]
    )
    target = kind(model, None, shape.target_layer_ids)
    target.eos_ids = frozenset(eos_ids)
    return target, DFlashDrafter(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))
