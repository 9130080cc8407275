"""The update in one pass over memory, against AdamW by the book in float64."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.trainer.adamw import BETAS, CLIP, DECAY, EVEN, ODD, RATE, by_the_book
from trainer.compile import own_device
from trainer.optimizer import ClippedAdamW

pytestmark = [pytest.mark.torch, pytest.mark.cuda]

GPU = torch.device("cuda:0")


@pytest.mark.parametrize(("dtype", "masters"), [(torch.float32, True), (torch.bfloat16, True), (torch.bfloat16, False)])
@pytest.mark.parametrize("shapes", [EVEN, ODD], ids=["even", "odd"])
@pytest.mark.parametrize("recorded", [False, True])
def test_the_update_is_adamw(shapes: list[tuple[int, ...]], dtype: torch.dtype, masters: bool, recorded: bool) -> None:
    generator = torch.Generator().manual_seed(1)

    def drawn() -> list[torch.Tensor]:
        return [torch.randn(shape, generator=generator).to(GPU, dtype) for shape in shapes]

    start, steps = drawn(), [drawn() for _ in range(4)]
    in_place = dtype == torch.bfloat16 and not masters
    wanted, norms = by_the_book(
        start, steps, (lambda exact: exact.to(dtype).double()) if in_place else lambda exact: exact
    )
    with own_device(GPU):
        parameters = [nn.Parameter(each.clone()) for each in start]
        named = [(str(index), each) for index, each in enumerate(parameters)]
        optimizer = ClippedAdamW(named, betas=BETAS, weight_decay=DECAY, clip=CLIP, masters=masters)
        optimizer.rate.fill_(RATE)
        held = [torch.zeros_like(each) for each in start]
        graph = torch.cuda.CUDAGraph()
        if recorded:
            kept = [each.clone() for each in [*parameters, *optimizer.tensors()]]
            optimizer.step(held)
            with torch.cuda.graph(graph, stream=torch.cuda.current_stream(GPU), capture_error_mode="thread_local"):
                norm = optimizer.step(held)
            with torch.no_grad():
                torch._foreach_copy_([*parameters, *optimizer.tensors()], kept)
        for gradients, expected in zip(steps, norms, strict=True):
            torch._foreach_copy_(held, gradients)
            if recorded:
                graph.replay()
            else:
                norm = optimizer.step(held)
            assert float(norm) == pytest.approx(expected, rel=1e-5)
            assert all(torch.equal(mine, given) for mine, given in zip(held, gradients, strict=True))
    state = optimizer.state_tensors()
    for index, (parameter, value) in enumerate(zip(parameters, wanted, strict=True)):
        updated = state.get(f"master.{index}", parameter).detach()
        assert (f"master.{index}" in state) == (dtype == torch.bfloat16 and masters)
        if in_place:
            # a number that lies at the edge between two of bfloat16's may fall to either side
            assert (updated.double() - value).norm() <= 1e-3 * value.norm()
            assert state[f"exp_avg.{index}"].dtype == state[f"exp_avg_sq.{index}"].dtype == dtype
        else:
            torch.testing.assert_close(updated.double(), value, rtol=1e-5, atol=1e-6)
        assert torch.equal(parameter.detach(), updated.to(dtype))
        assert float(state[f"step.{index}"]) == len(steps)


def test_two_replicas_stay_equal_bit_for_bit() -> None:
    generator = torch.Generator().manual_seed(2)
    start = [torch.randn(shape, generator=generator).to(GPU, torch.bfloat16) for shape in ODD]
    found = []
    with own_device(GPU):
        for _ in range(2):
            parameters = [nn.Parameter(each.clone()) for each in start]
            named = [(str(index), each) for index, each in enumerate(parameters)]
            optimizer = ClippedAdamW(named, betas=BETAS, weight_decay=DECAY, clip=CLIP)
            optimizer.rate.fill_(RATE)
            gradients = [each.clone() for each in start]
            for _ in range(3):
                optimizer.step(gradients)
            found.append([each.clone() for each in optimizer.tensors()])
        assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
