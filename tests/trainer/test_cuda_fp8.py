"""Products of 8-bit floats on a GPU: at a real drafter's shapes against float64, and in a captured graph."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch
from torch import Tensor

from tests.trainer.drafting import generator
from trainer import fp8
from trainer.canary.measure import relative
from trainer.compile import own_device
from trainer.fp8 import NarrowHead, quantised
from trainer.loss import block_loss

pytestmark = [pytest.mark.torch, pytest.mark.cuda]

GPU = torch.device("cuda:0")
# of one rounding to bfloat16, and of the fast accumulator
NEAR = 5e-3


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator(GPU).manual_seed(seed), device=GPU).to(torch.bfloat16)


def stand_for(rows: Tensor) -> Tensor:
    numbers, scale = quantised(rows)
    return numbers.double() * scale.double()


# rows, inputs, outputs: query, key, gate and down projections of Qwen3-8B's drafter, and a small one's
SHAPES = [
    (8192, 4096, 4096),
    (8192, 4096, 1024),
    (7680, 4096, 12288),
    (7680, 12288, 4096),
    (513, 576, 1536),
    (1, 64, 16),
]


def gradients(rows: Tensor, weight: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    found = fp8.linear(rows, weight)
    to_rows, to_weight = torch.autograd.grad(found, [rows, weight], gradient)
    return found.detach(), to_rows, to_weight


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_linear_layers_three_products(shape: tuple[int, int, int], compiled: bool) -> None:
    count, inputs, outputs = shape
    rows, weight = draw(1, count, inputs).requires_grad_(), (draw(2, outputs, inputs) * 0.02).requires_grad_()
    gradient = draw(3, count, outputs) * 1e-5
    work = torch.compile(gradients, fullgraph=False) if compiled else gradients
    found, to_rows, to_weight = work(rows, weight, gradient)
    of_weight, weight_scale = quantised(weight)
    assert relative(found, stand_for(rows) @ stand_for(weight).t()) < NEAR
    wanted = stand_for(gradient.float() * weight_scale.t()) @ of_weight.double()
    # the products' operands are rounded alike but on the edge between two numbers
    assert relative(to_rows, wanted) < (1e-2 if compiled else NEAR)
    assert relative(to_weight, gradient.double().t() @ rows.detach().double()) < NEAR


@pytest.mark.parametrize("vocabulary", [512, 151_936])
def test_the_head(vocabulary: int) -> None:
    width = 4096
    weight = draw(4, vocabulary, width) * 0.02
    head = NarrowHead.of(weight)
    hidden = draw(5, 1, 8 * 15, width).requires_grad_()
    labels = torch.randint(vocabulary, (1, 8, 16), generator=generator(6)).to(GPU)
    weights = torch.ones((1, 8, 16), device=GPU)
    weights[:, :, 0] = 0
    loss = block_loss(hidden, head, labels, weights, chunk=64).loss_sum
    (found,) = torch.autograd.grad(loss, hidden)
    flat, own = stand_for(hidden[0]), labels[0, :, 1:].flatten()
    words = head.words.double() * head.scale.double()
    # rounded to bfloat16, as the product gives them
    log_shares = (flat @ words.t()).to(torch.bfloat16).double().log_softmax(dim=1)
    shares = (log_shares.exp() * fp8.SHARE).float().to(torch.float8_e5m2).double() / fp8.SHARE
    index = torch.arange(len(own), device=GPU)
    shares[index, own] = torch.expm1(log_shares[index, own])
    assert float(loss.detach()) == pytest.approx(float(-log_shares[index, own].sum()), rel=1e-3)
    assert relative(found[0], shares @ words) < 2e-2
    exact = (hidden.detach()[0].double() @ weight.double().t()).softmax(dim=1)
    exact[index, own] -= 1
    assert relative(found[0], exact @ weight.double()) < 0.1


@pytest.mark.compiles
def test_a_graph_gives_the_same_bits() -> None:
    with own_device(GPU):
        weight = (draw(7, 256, 128) * 0.1).requires_grad_()
        held = draw(8, 96, 128).requires_grad_()
        gradient = draw(9, 96, 256)
        compiled = torch.compile(lambda rows: fp8.linear(rows, weight), fullgraph=True, dynamic=False)

        def step() -> list[Tensor]:
            found = compiled(held)
            return [found.detach(), *torch.autograd.grad(found, [held, weight], gradient)]

        for _ in range(2):
            step()
        stream, graph = torch.cuda.current_stream(GPU), torch.cuda.CUDAGraph()
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            recorded = step()
        for seed in (10, 11):
            with torch.no_grad():
                held.copy_(draw(seed, 96, 128))
            graph.replay()
            for mine, wanted in zip(recorded, step(), strict=True):
                assert torch.equal(mine, wanted)
                assert bool(wanted.any())
