"""A target whose layers lie on several devices: it computes what it computes on one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.compile import own_device
from trainer.decode import greedy_decode
from trainer.spread import balanced
from trainer.target import Target

pytestmark = pytest.mark.torch

CPU = torch.device("cpu")
GPUS = [torch.device("cuda:0"), torch.device("cuda:1")]


def same_as_on_one(path: Path, cache: Path, devices: list[torch.device]) -> Target:
    """The spread target, after its hidden states and its text were seen to be those of one device."""
    layers = (0, 2, 3)
    ids, lengths = torch.tensor([[2, 9, 10, 11, 12, 13], [2, 20, 21, 1, 1, 1]]), torch.tensor([6, 3])
    alone = Target.load(path, devices[:1], torch.float32, layers, cache)
    spread = Target.load(path, devices, torch.float32, layers, cache)
    first = devices[0]
    with own_device(*devices):
        found, wanted = (each.features(ids.to(first), lengths.to(first)) for each in (spread, alone))
        assert found.device == first
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
        prompt = ids[:1].to(first)
        assert greedy_decode(spread, prompt, 12, ()) == greedy_decode(alone, prompt, 12, ())
        seen = spread.model.generate(prompt, max_new_tokens=4, do_sample=False, pad_token_id=0)
        assert seen.tolist() == alone.model.generate(prompt, max_new_tokens=4, do_sample=False, pad_token_id=0).tolist()
    return spread


def test_a_spread_target_is_the_target(tiny_target: Path, tmp_path: Path) -> None:
    assert same_as_on_one(tiny_target, tmp_path, [CPU, CPU]).devices == (CPU,)


@pytest.mark.cuda(2)
def test_a_spread_target_is_the_target_on_two_gpus(tiny_target: Path, tmp_path: Path) -> None:
    target = same_as_on_one(tiny_target, tmp_path, GPUS)
    assert target.devices == tuple(GPUS)
    places = [next(layer.parameters()).device for layer in target.model.model.layers]
    assert places == sorted(places, key=str)
    assert set(places) == set(GPUS)


@given(st.lists(st.integers(1, 9), min_size=2, max_size=30), st.integers(0, 40), st.integers(1, 5))
def test_layers_are_dealt_out_evenly_and_in_order(sizes: list[int], first: int, parts: int) -> None:
    found = balanced(sizes, first, parts)
    assert found == sorted(found)
    assert set(found) <= set(range(parts))
    share = (first + sum(sizes)) / parts
    for part in range(parts):
        held = sum(size for size, place in zip(sizes, found, strict=True) if place == part)
        assert held + (first if part == 0 else 0) <= max(share + max(sizes), first + max(sizes) / 2)
