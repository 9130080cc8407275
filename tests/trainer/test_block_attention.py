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
from trainer.drafter_config import SlidingWindow

pytest.importorskip("triton", reason="no Triton here: its wheels are for Linux")
pytestmark = pytest.mark.torch

DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
SMALL = Tilings(*[Tiling(16, 16, 4, 2)] * 4)
LARGE = Tilings(*[Tiling(64, 32, 4, 1)] * 2, *[Tiling(32, 64, 4, 1)] * 2)
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
    """`sorted` as anchors are, `padded`: the last slots see nothing, `any`: no order, some beyond the context."""
    beyond = 9 if kind == "any" else 0
    limits = torch.randint(0, context + beyond + 1, (rows, slots), generator=generator(seed))
    if kind != "any":
        limits = limits.sort(dim=1).values
    if kind == "padded":
        limits[-1, slots // 2 :] = 0
    return limits


@settings(max_examples=8, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    rows=st.integers(1, 2),
    group=st.integers(1, 3),
    context=st.sampled_from([1, 15, 16, 40]),
    slots=st.integers(1, 6),
    block_size=st.sampled_from([2, 3, 7, 8, 20]),
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


@pytest.mark.parametrize(
    ("limits", "window"),
    [
        # queries that see all of a tile of keys, some that do not, and again some that do
        ([48, 48, 3, 20, 48, 48], None),
        # the last key of a tile is the first that anything sees, and the first of a tile the last
        ([35] * 6, SlidingWindow(20, "anchor", causal=False)),
        ([33] * 6, SlidingWindow(20, "anchor", causal=False)),
        # the second key of a tile is the first
        ([37] * 6, SlidingWindow(20, "anchor", causal=False)),
    ],
)
def test_tiles_are_visited_to_their_edges(monkeypatch, limits, window):
    monkeypatch.setattr(block_attention, "tilings", lambda *_: SMALL)
    check(draw(7, 1, 2, 1, 48, 48, 16), torch.tensor([limits]), 8, window, 1e-5)


def test_a_drafter_compiled_over_ranges_is_one_over_dense_masks(monkeypatch):
    """Hidden states and gradients of a sliding and a full layer, with tiles skipped, seen in part and seen whole."""
    monkeypatch.setattr(block_attention, "tilings", lambda *_: LARGE)
    data = batch(5, rows=1, length=100, anchors=24, window=SlidingWindow(30), dtype=torch.float32)
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
        found, events = run(compiled, ranges), len(log.events)
        earlier = [each._replace(ends=(each.ends - 1).clamp(min=0)) for each in ranges]
        assert not torch.equal(compiled(*given, *earlier), found[0])
        assert len(log.events) == events, "compiled again for other numbers"
    for one, other in zip(found, run(hidden, [each.to(DEVICE) for each in data.masks]), strict=True):
        torch.testing.assert_close(one, other, rtol=2e-4, atol=2e-5)


# the interpreter multiplies the bits of bfloat16 as if they were integers
@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.cuda)])
def test_16_bit_numbers_in_any_layout(dtype):
    inputs = [each.to(dtype) for each in draw(1, 2, 4, 2, 40, 48, 32)]
    inputs[1] = inputs[1].contiguous()
    # a view with gaps, one whose last dimension is not dense, and a gradient that is a view of one number
    inputs[2] = torch.cat([inputs[2], inputs[2]], dim=-1)[..., :32]
    inputs[4] = inputs[4].transpose(2, 3).contiguous().transpose(2, 3)
    inputs[5] = torch.ones((), dtype=dtype, device=DEVICE).expand(inputs[5].shape)
    check(inputs, limits_of("sorted", 2, 6, 40, 3), 8, None, 1e-2)


def test_the_output_lies_as_the_next_projection_reads_it():
    inputs = draw(1, 1, 4, 2, 16, 16, 16)
    found = ours(inputs, block_ranges(torch.tensor([[3, 9]], device=DEVICE), 8))
    assert found[0].transpose(1, 2).flatten(2).data_ptr() == found[0].data_ptr()
    assert found[1].transpose(1, 2).is_contiguous()


def test_the_operators_say_truly_what_they_give():
    """Their fakes, strides included, aliasing, and how their gradient is registered."""
    *inputs, _gradient = [each.requires_grad_(True) for each in draw(1, 1, 2, 1, 16, 16, 16)]
    starts, ends, *constants = block_ranges(torch.tensor([[3, 9]], device=DEVICE), 8)
    torch.library.opcheck(block_attention.block_attention, (*inputs, starts, ends, *constants))


@pytest.mark.parametrize("wrong", [{"dtype": torch.float64}, {"dim": 264}])
def test_what_has_no_kernel_is_refused(wrong):
    inputs = [each.to(wrong.get("dtype")) for each in draw(1, 1, 2, 1, 16, 16, wrong.get("dim", 16))]
    with pytest.raises(ValueError, match="16-bit numbers and float32 and heads of up to 256"):
        ours(inputs, block_ranges(torch.tensor([[3, 9]], device=DEVICE), 8))


@pytest.mark.cuda
@pytest.mark.parametrize("window", [None, SlidingWindow(400), SlidingWindow(400, "anchor", causal=False)])
@pytest.mark.parametrize(
    ("dtype", "dim"),
    [*[(torch.bfloat16, dim) for dim in (64, 80, 128, 256)], (torch.float32, 32), (torch.float32, 128)],
)
def test_a_gpus_tiles_are_as_dense_and_always_the_same(dtype, dim, window):
    inputs = [each.to(dtype) for each in draw(2, 2, 8, 2, 1000, 100 * 16, dim)]
    limits = limits_of("padded", 2, 100, 1000, 4)
    check(inputs, limits, 16, window, 1e-2 if dtype == torch.bfloat16 else 1e-5)
    ranges = block_ranges(limits.to(DEVICE), 16, window)
    once, again = ours(inputs, ranges), ours(inputs, ranges)
    assert all(torch.equal(one, other) for one, other in zip(once, again, strict=True))


@pytest.mark.cuda
def test_a_graph_reads_the_ranges_of_each_replay():
    inputs = [each.bfloat16() for each in draw(2, 1, 8, 2, 300, 40 * 16, 128)]
    limits = limits_of("sorted", 1, 40, 300, 1).to(DEVICE)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        ours(inputs, block_ranges(limits, 16))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            found = ours(inputs, block_ranges(limits, 16))
        for seed in (2, 3):
            limits.copy_(limits_of("sorted", 1, 40, 300, seed))
            graph.replay()
            wanted = ours(inputs, block_ranges(limits, 16))
            assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
        stream.synchronize()
