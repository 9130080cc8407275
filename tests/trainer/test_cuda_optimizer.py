"""The update in one pass over memory, against AdamW by the book in float64."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trainer.compile import own_device
from trainer.optimizer import MasterAdamW

pytestmark = [pytest.mark.torch, pytest.mark.cuda]

GPU = torch.device("cuda:0")
BETAS, DECAY, CLIP, RATE = (0.9, 0.95), 0.1, 0.5, 1e-2
EVEN = [(64, 48), (16,), (5, 4096)]
ODD = [(7,), (1,), (13, 5), (4097,), (64, 48)]


def by_the_book(start: list[torch.Tensor], steps: list[list[torch.Tensor]]) -> tuple[list[torch.Tensor], list[float]]:
    """Parameters in float64 after the steps, and each step's norm."""
    parameters = [each.double() for each in start]
    means, squares = ([torch.zeros_like(each) for each in parameters] for _ in range(2))
    norms = []
    for number, gradients in enumerate(steps, 1):
        wide = [each.double() for each in gradients]
        norm = float(sum(float(each.square().sum()) for each in wide)) ** 0.5
        norms.append(norm)
        scale = min(1.0, CLIP / (norm + 1e-6))
        for p, g, m, v in zip(parameters, wide, means, squares, strict=True):
            g = g * scale
            p.mul_(1 - RATE * DECAY)
            m.mul_(BETAS[0]).add_(g, alpha=1 - BETAS[0])
            v.mul_(BETAS[1]).addcmul_(g, g, value=1 - BETAS[1])
            mean, square = m / (1 - BETAS[0] ** number), v / (1 - BETAS[1] ** number)
            p.sub_(RATE * mean / (square.sqrt() + 1e-8))
    return parameters, norms


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shapes", [EVEN, ODD], ids=["even", "odd"])
@pytest.mark.parametrize("recorded", [False, True])
def test_the_update_is_adamw(shapes: list[tuple[int, ...]], dtype: torch.dtype, recorded: bool) -> None:
    generator = torch.Generator().manual_seed(1)

    def drawn() -> list[torch.Tensor]:
        return [torch.randn(shape, generator=generator).to(GPU, dtype) for shape in shapes]

    start, steps = drawn(), [drawn() for _ in range(4)]
    wanted, norms = by_the_book(start, steps)
    with own_device(GPU):
        parameters = [nn.Parameter(each.clone()) for each in start]
        named = [(str(index), each) for index, each in enumerate(parameters)]
        optimizer = MasterAdamW(named, betas=BETAS, weight_decay=DECAY, clip=CLIP)
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
        master = state.get(f"master.{index}", parameter).detach()
        torch.testing.assert_close(master.double(), value, rtol=1e-5, atol=1e-6)
        assert torch.equal(parameter.detach(), master.to(dtype))
        assert float(state[f"step.{index}"]) == len(steps)


def test_two_replicas_stay_equal_bit_for_bit() -> None:
    generator = torch.Generator().manual_seed(2)
    start = [torch.randn(shape, generator=generator).to(GPU, torch.bfloat16) for shape in ODD]
    found = []
    with own_device(GPU):
        for _ in range(2):
            parameters = [nn.Parameter(each.clone()) for each in start]
            named = [(str(index), each) for index, each in enumerate(parameters)]
            optimizer = MasterAdamW(named, betas=BETAS, weight_decay=DECAY, clip=CLIP)
            optimizer.rate.fill_(RATE)
            gradients = [each.clone() for each in start]
            for _ in range(3):
                optimizer.step(gradients)
            found.append([each.clone() for each in optimizer.tensors()])
        assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
