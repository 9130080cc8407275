"""A strategy with graphs sees each bucket at the same addresses, whatever batch comes; others see the batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from trainer.compile import STRATEGIES, Strategy
from trainer.dflash_model import DFlashDrafter, DrafterConfig
from trainer.drafter_config import SlidingWindow
from trainer.optimizer import ClippedAdamW
from trainer.step import Batch, DrafterStep, FrozenHead, blank_batch

pytestmark = pytest.mark.torch

CONFIG = DrafterConfig(
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=8,
    rms_norm_eps=1e-6,
    rope_theta=10000.0,
    vocab_size=24,
    block_size=4,
    num_target_layers=4,
    target_layer_ids=(1,),
    mask_token_id=3,
    max_position_embeddings=64,
    tie_word_embeddings=True,
    initializer_range=0.02,
)


def random_batch(seed: int, bucket: int) -> Batch:
    draw = torch.Generator().manual_seed(seed)
    blank = blank_batch(CONFIG, bucket, 2, 3, device=torch.device("cpu"), dtype=torch.float32)
    return replace(
        blank,
        input_ids=torch.randint(4, 24, blank.input_ids.shape, generator=draw),
        features=torch.randn(blank.features.shape, generator=draw),
        labels=torch.randint(4, 24, blank.labels.shape, generator=draw),
        weights=torch.rand(blank.weights.shape, generator=draw),
        lengths=torch.tensor([bucket, bucket - 3]),
    )


def watched(strategy: Strategy, seen: list[list[int]]) -> Strategy:
    """The strategy, uncompiled, noting where each call's tensors lie."""

    def compile(function: Any) -> Any:
        def call(*inputs: torch.Tensor) -> Any:
            seen.append([each.data_ptr() for each in inputs])
            return function(*inputs)

        return call

    return replace(strategy, compile=compile)


def step(
    strategy: Strategy, batches: list[Batch], buckets: tuple[int, ...], config: DrafterConfig = CONFIG
) -> list[list[torch.Tensor]]:
    drafter = DFlashDrafter(config, generator=torch.Generator().manual_seed(1))
    weight = torch.randn((24, 16), generator=torch.Generator().manual_seed(2))
    optimizer = ClippedAdamW(list(drafter.named_parameters()), betas=(0.9, 0.95), weight_decay=0.0, clip=1.0)
    frozen = FrozenHead(weight, weight)
    own = DrafterStep(
        drafter, frozen, optimizer, strategy, buckets=buckets, rows=2, slots=3, accumulation=1, replicas=1, name="w"
    )
    gradients = []
    for index, batch in enumerate(batches):
        # the normaliser is a new tensor each step too
        own.accumulate(batch, torch.tensor(1.0 / (index + 1)), first=True, last=True)
        gradients.append([each.clone() for each in own.gradients])
    return gradients


# one mask, and one for each of two kinds of layers
SLIDING = replace(CONFIG, num_hidden_layers=2, sliding_layers=(0,), window=SlidingWindow(5))


@pytest.mark.parametrize("config", [CONFIG, SLIDING], ids=["full", "sliding"])
@pytest.mark.parametrize("name", ["reduce-overhead", "reduce-overhead-trees"])
def test_graphs_always_get_the_same_memory_and_the_new_values(name: str, config: DrafterConfig) -> None:
    batches = [random_batch(seed, bucket) for seed, bucket in enumerate((12, 16, 12, 16, 12))]
    seen: list[list[int]] = []
    graphed = step(watched(STRATEGIES[name], seen), batches, (12, 16), config)
    seen = seen[-len(batches) :]
    assert seen[0] == seen[2] == seen[4]
    assert seen[1] == seen[3]
    assert not set(seen[0]) & set(seen[1])
    plain = step(STRATEGIES["eager"], batches, (12, 16), config)
    for one, other in zip(graphed, plain, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("name", ["eager", "default"])
def test_without_graphs_nothing_is_copied(name: str) -> None:
    batch = random_batch(0, 12)
    seen: list[list[int]] = []
    step(watched(STRATEGIES[name], seen), [batch], (12,))
    assert batch.features.data_ptr() in seen[-1]
