"""The kernels of the drafter's attention against dense attention in float64: what is seen, gradients, any shape.

Without a GPU they run in Triton's interpreter: the same kernels, operation by operation.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.trainer.drafting import batch, drafter, generator, windows
from trainer import block_attention
from trainer.block_attention import Tiling, Tilings, attend
from trainer.block_mask import BlockRanges, block_ranges, context_limits, dense_mask_of
from trainer.compile import CompileLog

pytest.importorskip("triton", reason="no Triton here: its wheels are for Linux")
pytestmark = pytest.mark.torch

DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
SMALL = Tilings(*[Tiling(16, 16, 4, 2)] * 4)
UNEVEN = Tilings(Tiling(32, 16, 4, 2), Tiling(16, 32, 4, 2), Tiling(32, 16, 4, 2), Tiling(16, 32, 4, 2))


def draw(seed: int, rows: int, heads: int, kv_heads: int, context: int, queries: int, dim: int) -> list[Tensor]:
    """Queries, the context's keys and values, the blocks' own, and a gradient; each lies as a projection gives it."""
    numbers = generator(seed)
    shapes = [(heads, queries), *[(kv_heads, context)] * 2, *[(kv_heads, queries)] * 2, (heads, queries)]
    made = [torch.randn((rows, places, count, dim), generator=numbers) for count, places in shapes]
    return [each.transpose(1, 2).to(DEVICE) for each in made]


def dense(inputs: list[Tensor], mask: Tensor) -> list[Tensor]:
    """The output and the five gradients, in float64, from the definition."""
    *tensors, gradient = [each.double().requires_grad_(True) for each in inputs]
    queries, context_keys, context_values, own_keys, own_values = tensors
    group = queries.shape[1] // own_keys.shape[1]
    keys = torch.cat([context_keys, own_keys], dim=2).repeat_interleave(group, dim=1)
    values = torch.cat([context_values, own_values], dim=2).repeat_interleave(group, dim=1)
    scores = (queries @ keys.transpose(-2, -1)) * queries.shape[-1] ** -0.5
    found = scores.masked_fill(~mask, float("-inf")).softmax(dim=-1) @ values
    return [found.detach(), *torch.autograd.grad(found, tensors, gradient)]


def ours(inputs: list[Tensor], ranges: BlockRanges) -> list[Tensor]:
    *tensors, gradient = [each.detach().requires_grad_(True) for each in inputs]
    queries, context_keys, context_values, own_keys, own_values = tensors
    found = attend(queries, (context_keys, context_values), (own_keys, own_values), ranges)
    return [found.detach(), *torch.autograd.grad(found, tensors, gradient)]


def check(inputs: list[Tensor], limits: Tensor, block_size: int, window, tolerance: float) -> None:
    limits = limits.to(DEVICE)
    mask = dense_mask_of(limits, inputs[1].shape[2], block_size, window)
    found, wanted = ours(inputs, block_ranges(limits, block_size, window)), dense(inputs, mask)
    names = ["output", "queries", "context keys", "context values", "own keys", "own values"]
    for name, one, other in zip(names, found, wanted, strict=True):
        off = float((one.double() - other).norm())
        assert off <= tolerance * float(other.norm()) + 1e-6, f"{name}: {off / float(other.norm())}"


def limits_of(kind: str, rows: int, slots: int, context: int, seed: int) -> Tensor:
    """`sorted` as anchors are, `padded`: the last slots see nothing, `any`: no order, 0 anywhere, some all the same."""
    limits = torch.randint(0, context + 1, (rows, slots), generator=generator(seed))
    if kind != "any":
        limits = limits.sort(dim=1).values
    if kind == "padded":
        limits[-1, slots // 2 :] = 0
    return limits


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    rows=st.integers(1, 2),
    group=st.integers(1, 3),
    context=st.sampled_from([1, 15, 16, 40, 64]),
    slots=st.integers(1, 9),
    block_size=st.sampled_from([2, 3, 7, 8, 16, 24]),
    dim=st.sampled_from([16, 24]),
    kind=st.sampled_from(["sorted", "padded", "any"]),
    slides=st.tuples(st.sampled_from([0, 1, 20]), st.integers(0, 4)),
    tiling=st.sampled_from([SMALL, UNEVEN]),
)
def test_any_shape_is_as_dense(seed, rows, group, context, slots, block_size, dim, kind, slides, tiling):
    window = windows(block_size + slides[0])[slides[1]]
    inputs = draw(seed, rows, group, 1, context, slots * block_size, dim)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_attention, "tilings", lambda *_: tiling)
        check(inputs, limits_of(kind, rows, slots, context, seed), block_size, window, 1e-5)


@pytest.mark.parametrize("window", windows(20))
def test_a_drafter_compiled_over_ranges_is_one_over_dense_masks(window):
    """Losses and all gradients, with tiles that are skipped, seen in part and seen whole."""
    data = batch(5, rows=2, length=150, anchors=40, window=window, dtype=torch.float32)
    model = drafter(1, torch.float32, data.config).to(DEVICE)
    limits = context_limits(data.anchors, data.lengths).to(DEVICE)
    given = [each.to(DEVICE) for each in (data.block_embeddings, data.target_hidden, data.anchors.positions)]
    ranges = [block_ranges(limits, 4, data.config.window_of(kind)) for kind in data.config.attention_types]

    def hidden(*inputs):
        return model(*inputs)

    def run(function, masks) -> list[Tensor]:
        model.zero_grad()
        found = function(*given, *masks)
        found.sin().sum().backward()
        return [found.detach(), *[each.grad.clone() for each in model.parameters()]]

    with CompileLog() as log:
        compiled = torch.compile(hidden, backend="aot_eager", fullgraph=True, dynamic=False)
        found = run(compiled, ranges)
        others = [BlockRanges(each.starts, each.ends.flip(1), 4, each.causal) for each in ranges]
        assert not torch.equal(run(compiled, others)[0], found[0])
        assert len(log.events) == 1, "compiled again for other numbers"
    for one, other in zip(found, run(hidden, [each.to(DEVICE) for each in data.masks]), strict=True):
        torch.testing.assert_close(one, other, rtol=2e-4, atol=2e-5)
