"""The quality benchmark counts acceptance without decoding: the counts are those of real decoding."""

from __future__ import annotations

import pytest
import torch

from benchmarks.acceptance import acceptance, cycles_of, frozen_of
from tests.trainer.pairs import tiny_pair
from trainer.data import HeldOut
from trainer.decode import greedy_decode, speculative_decode

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("block_size", [3, 5])
def test_cycles_without_decoding_are_those_of_decoding(block_size: int) -> None:
    target, drafter = tiny_pair()
    frozen = frozen_of(target, torch.float32)
    prompts = [[first, second, 4, 1] for first in range(4) for second in range(9)]
    wanted, texts = [], []
    for prompt in prompts:
        given = torch.tensor([prompt])
        # the simulated cycles end where a block reaches beyond the known text
        longer = greedy_decode(target, given, 24 + block_size, ())
        texts.append(HeldOut(tuple(prompt), tuple(longer)))
        wanted.append(speculative_decode(target, drafter, given, max_new=24, eos_ids=(), block_size=block_size))
    found = cycles_of(target, drafter, frozen, texts, (), block_size)
    for simulated, decoded in zip(found, wanted, strict=True):
        assert simulated[: len(decoded.accepted) - 1] == decoded.accepted[:-1]
    assert any(count for each in found for count in each), "a drafter that is never right shows little"
    total = acceptance(target, drafter, frozen, texts, (), block_size=block_size)
    counts = [count for each in found for count in each]
    assert total.cycles == len(counts)
    assert total.tau == pytest.approx(1 + sum(counts) / len(counts))
