"""The update without float32 master weights against torch's AdamW, and its kernels, run by Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.trainer.adamw import BETAS, CLIP, DECAY, EVEN, ODD, RATE, by_the_book
from trainer.optimizer import ClippedAdamW

pytestmark = pytest.mark.torch

LOW = torch.bfloat16


def drawn(shapes: list[tuple[int, ...]], seed: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def named(tensors: list[Tensor]) -> list[tuple[str, nn.Parameter]]:
    return [(str(index), nn.Parameter(each.clone())) for index, each in enumerate(tensors)]


@pytest.mark.parametrize("dtype", [torch.float32, LOW])
def test_without_masters_it_is_torchs_adamw_on_the_parameters_bit_for_bit(dtype: torch.dtype) -> None:
    mine, theirs = named(drawn(ODD, 1, dtype)), named(drawn(ODD, 1, dtype))
    optimizer = ClippedAdamW(mine, betas=BETAS, weight_decay=DECAY, clip=1e9, masters=False)
    # a power of two: torch has the rate in float64
    optimizer.rate.fill_(2**-7)
    reference = torch.optim.AdamW([each for _, each in theirs], lr=2**-7, betas=BETAS, weight_decay=DECAY, fused=True)
    for step in range(4):
        gradients = drawn(ODD, 10 + step, dtype)
        for (_, each), gradient in zip(theirs, gradients, strict=True):
            each.grad = gradient.clone()
        reference.step()
        norm = optimizer.step(gradients)
        wanted = sum(float(each.double().square().sum()) for each in gradients) ** 0.5
        assert float(norm) == pytest.approx(wanted, rel=1e-6)
    state = optimizer.state_tensors()
    assert not any(name.startswith("master.") for name in state)
    for (name, parameter), (_, other) in zip(mine, theirs, strict=True):
        assert torch.equal(parameter, other)
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(state[f"{key}.{name}"], reference.state[other][key])
    # what a captured step holds: nothing but moments and counts
    assert {each.dtype for each in optimizer.tensors()} == {dtype, torch.float32}
    assert len(optimizer.tensors()) == 3 * len(mine)


def test_without_masters_gradients_are_clipped_too() -> None:
    start, steps = drawn(ODD, 1, LOW), [drawn(ODD, 10 + step, LOW) for step in range(3)]
    mine = named(start)
    optimizer = ClippedAdamW(mine, betas=BETAS, weight_decay=DECAY, clip=CLIP, masters=False)
    optimizer.rate.fill_(RATE)
    norms = [float(optimizer.step(gradients)) for gradients in steps]
    wanted, expected = by_the_book(start, steps, lambda exact: exact.to(LOW).double())
    assert norms == pytest.approx(expected, rel=1e-6)
    for (_, parameter), value, first in zip(mine, wanted, start, strict=True):
        moved = (value - first.double()).norm()
        assert (parameter.detach().double() - value).norm() < 0.1 * moved


def cut(exact: Tensor) -> Tensor:
    """To bfloat16 as the interpreter does it: the digits behind it are cut off."""
    return (exact.float().view(torch.int32) & -65536).view(torch.float32).double()


@pytest.mark.skipif(torch.cuda.is_available(), reason="where there is a GPU, kernels are compiled for it")
@pytest.mark.parametrize("shapes", [EVEN, ODD], ids=["even", "odd"])
@pytest.mark.parametrize(("dtype", "masters"), [(torch.float32, False), (LOW, True), (LOW, False)])
def test_the_kernels_are_adamw(shapes: list[tuple[int, ...]], dtype: torch.dtype, masters: bool) -> None:
    pytest.importorskip("triton")
    from trainer.fused_adamw import FusedAdamW

    start, steps = drawn(shapes, 1, dtype), [drawn(shapes, 10 + step, dtype) for step in range(3)]
    parameters = [each.clone() for each in start]
    updated = [each.float() for each in start] if masters else parameters
    means, squares = ([torch.zeros_like(each) for each in updated] for _ in range(2))
    counts = torch.zeros(len(start))
    kernels = FusedAdamW(updated, means, squares, parameters if masters else [], counts)
    in_place = dtype == LOW and not masters
    wanted, norms = by_the_book(start, steps, cut) if in_place else by_the_book(start, steps)
    for gradients, expected in zip(steps, norms, strict=True):
        norm = kernels.step(
            gradients, torch.tensor(RATE), betas=BETAS, decay=DECAY, clip=CLIP, epsilon=1e-8, clip_epsilon=1e-6
        )
        assert float(norm) == pytest.approx(expected, rel=1e-5)
    for value, found, parameter in zip(wanted, updated, parameters, strict=True):
        # a number that lies at the edge between two of bfloat16's may fall to either side
        assert (found.double() - value).norm() <= (1e-3 if in_place else 1e-6) * value.norm()
        assert torch.equal(parameter.double(), cut(found) if dtype == LOW else found.double())
    assert counts.tolist() == [len(steps)] * len(start)


def test_masters_in_another_dtype_than_their_moments_are_refused() -> None:
    pytest.importorskip("triton")
    from trainer.fused_adamw import FusedAdamW

    low, wide = [torch.zeros(3, dtype=LOW)], [torch.zeros(3)]
    for masters, moments, parameters in ((low, wide, []), (low, low, low)):
        with pytest.raises(ValueError, match="one dtype"):
            FusedAdamW(masters, moments, moments, parameters, torch.zeros(1))
