"""The kernel of the loss on a GPU, against cross-entropy in float64. Without a GPU Triton's interpreter runs it."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.trainer.drafting import batch, generator
from trainer import loss as loss_module
from trainer.loss import BlockLoss, block_labels, block_loss

pytest.importorskip("triton")

from trainer.fp8 import shares_of
from trainer.fused_cross_entropy import cross_entropy_, cross_entropy_shares

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="where there is a GPU, kernels are compiled for it")
pytestmark = [
    pytest.mark.torch,
    pytest.mark.parametrize(
        "device", [pytest.param("cpu", marks=interpreted), pytest.param("cuda", marks=pytest.mark.cuda)]
    ),
]

DTYPES = [torch.float32, torch.bfloat16]


def in_double(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Losses and gradient by the book."""
    wide = logits.double().requires_grad_()
    losses = torch.nn.functional.cross_entropy(wide, labels, reduction="none")
    losses.sum().backward()
    return losses.detach(), wide.grad


def judge(logits: Tensor, labels: Tensor, firsts: int) -> None:
    """Everything that the kernel says of these logits, with and without a gradient."""
    wanted, gradient = in_double(logits, labels)
    right = logits.float().argmax(dim=1)[:firsts] == labels[:firsts]
    kept = logits.clone()
    # the log of the sum is of the logits' size, in float32
    near = torch.finfo(torch.float32).eps * (4 + float(logits.abs().max()))
    for with_gradient in (False, True):
        losses, hits = cross_entropy_(logits, labels, firsts, with_gradient)
        torch.testing.assert_close(losses.double(), wanted, rtol=2e-6, atol=near)
        assert torch.equal(hits, right)
        if not with_gradient:
            assert torch.equal(logits, kept)
    # of the dtype's roundings one, since the interpreter cuts digits off
    rounding = torch.finfo(logits.dtype).eps
    torch.testing.assert_close(logits.double(), gradient, rtol=max(rounding, 2e-6), atol=near)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("words", [1, 2, 40, 4095, 4096, 4097, 20_000])
def test_cross_entropy_and_its_gradient(device: str, words: int, dtype: torch.dtype) -> None:
    drawn = generator(words)
    for scale in (0.0, 1.0, 20.0):
        rows = int(torch.randint(1, 6, (), generator=drawn))
        logits = (scale * torch.randn((rows, words), generator=drawn)).to(device, dtype)
        labels = torch.randint(words, (rows,), generator=drawn).to(device)
        # one that is right
        labels[0] = logits[0].argmax()
        judge(logits, labels, int(torch.randint(rows + 1, (), generator=drawn)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("words", [16, 4096, 5008])
def test_shares_of_8_bits(device: str, words: int, dtype: torch.dtype) -> None:
    drawn = generator(words)
    logits = (5 * torch.randn((5, words), generator=drawn)).to(device, dtype)
    labels = torch.randint(words, (5,), generator=drawn).to(device)
    kept = logits.clone()
    losses, hits, shares = cross_entropy_shares(logits, labels, 3)
    wanted, _ = in_double(logits, labels)
    torch.testing.assert_close(losses.double(), wanted, rtol=2e-6, atol=1e-5)
    assert torch.equal(hits, logits[:3].argmax(dim=1) == labels[:3])
    assert torch.equal(logits, kept)
    right = shares_of(logits.float(), logits.float().logsumexp(dim=1), labels).double()
    off = shares.double() != right
    if device == "cpu":
        # the interpreter loses the carry of what rounds up to a power of two
        off &= torch.frexp(right).mantissa != 0.5
    # on the edge between two numbers either is right
    assert float(off.double().mean()) < 1e-2
    torch.testing.assert_close(shares.double()[off], right[off], rtol=0.26, atol=2.0**-16)
    assert not shares.double().gather(1, labels[:, None]).any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_of_equal_logits_the_first_is_the_most_likely(device: str, dtype: torch.dtype) -> None:
    logits = torch.zeros((4, 9000), dtype=dtype, device=device)
    logits[:, [8, 4500, 8999]] = 3.0
    judge(logits, torch.tensor([8, 4500, 8999, 9], device=device), 4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_lie_apart(device: str, dtype: torch.dtype) -> None:
    whole = torch.randn((3, 64), generator=generator(1)).to(device, dtype)
    around = whole[:, 50:].clone()
    judge(whole[:, :50], torch.tensor([0, 49, 7], device=device), 2)
    assert torch.equal(whole[:, 50:], around)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_confident_row_keeps_its_digits(device: str, dtype: torch.dtype) -> None:
    logits = torch.tensor([[6.0, 0.0, -1.0]], dtype=dtype, device=device)
    _, gradient = in_double(logits, torch.tensor([0], device=device))
    cross_entropy_(logits, torch.tensor([0], device=device), 0, True)
    # p rounds to 1 in bfloat16, p - 1 is -0.0034
    torch.testing.assert_close(logits.double(), gradient, rtol=max(torch.finfo(dtype).eps, 1e-3), atol=0)


def test_what_is_no_number_or_no_word_has_no_loss(device: str) -> None:
    logits = torch.zeros((4, 10), device=device)
    logits[0, 3] = math.nan
    losses, _ = cross_entropy_(logits, torch.tensor([0, 10, -1, 2], device=device), 4, True)
    assert losses.isnan().tolist() == [True, True, True, False]


@pytest.mark.parametrize("logits", [torch.zeros((4, 3)).t(), torch.zeros((3, 4), dtype=torch.float64)])
def test_logits_that_it_cannot_read_are_refused(device: str, logits: Tensor) -> None:
    with pytest.raises(ValueError, match="contiguous rows"):
        cross_entropy_(logits.to(device), torch.zeros(logits.shape[0], dtype=torch.long, device=device), 0, True)


def through(work: Callable[..., BlockLoss], device: str, dtype: torch.dtype) -> tuple[list[float], Tensor]:
    """The loss's numbers and the gradient by the hidden states, of two rows in chunks of 7."""
    data = batch(8, rows=2, length=20, anchors=6, dtype=dtype)
    labels, weights = block_labels(data.input_ids, data.loss_mask, data.lengths, data.anchors, 4, 4.0)
    hidden = torch.randn((2, 6 * 3, 16), generator=generator(1)).to(device, dtype).requires_grad_()
    found = work(hidden, data.embedding.to(device), labels.to(device), weights.to(device), chunk=7)
    (found.loss_sum / 3).backward()
    assert hidden.grad is not None
    return [found.loss_sum.item(), found.first_slot_correct.item()], hidden.grad


@pytest.mark.compiles
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_loss_through_the_kernel_is_the_loss(
    device: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, gradient = through(block_loss, "cpu", dtype)
    # as on a GPU
    monkeypatch.setattr(loss_module, "_fused", lambda logits: True)
    for work in (block_loss, torch.compile(block_loss, fullgraph=True)):
        found, mine = through(work, device, dtype)
        assert found == pytest.approx(wanted, rel=1e-5 if dtype == torch.float32 else 1e-2)
        off = (mine.double().cpu() - gradient.double()).norm() / gradient.double().norm()
        assert off < 4 * torch.finfo(dtype).eps
