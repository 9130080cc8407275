"""Labels, weights and the fused head."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.trainer.drafting import batch, generator
from trainer.anchors import Anchors
from trainer.loss import block_labels, block_loss, decay_gamma, dpace_weights, slot_decay

pytestmark = pytest.mark.torch


def test_gamma_is_the_papers_and_linear_between():
    assert [decay_gamma(size) for size in (8, 10, 16)] == [4.0, 5.0, 7.0]
    assert decay_gamma(9) == 4.5
    assert decay_gamma(13) == 6.0
    assert decay_gamma(2) == 1.0
    assert decay_gamma(19) == pytest.approx(8.0)


def test_labels_are_the_tokens_at_their_own_positions():
    input_ids = torch.arange(100, 108)[None]
    loss_mask = torch.tensor([[0, 1, 1, 1, 0, 1, 1, 1]], dtype=torch.bool)
    anchors = Anchors(torch.tensor([[1, 5, 5]]), torch.tensor([[True, True, False]]))
    labels, weights = block_labels(input_ids, loss_mask, torch.tensor([7]), anchors, 4, 2.0)
    assert labels[0, 0].tolist() == [101, 102, 103, 104]
    decay = [1.0, math.exp(-0.5), math.exp(-1.0)]
    # token 4 is not supervised
    assert weights[0, 0].tolist() == pytest.approx([0, decay[0], decay[1], 0])
    # the row ends at 7, so slots 2 and 3 hang over
    assert weights[0, 1].tolist() == pytest.approx([0, decay[0], 0, 0])
    assert weights[0, 2].tolist() == [0, 0, 0, 0]
    assert ((labels >= 100) & (labels < 108)).all()


def tensors(dtype=torch.float64):
    data = batch(8, rows=2, length=20, anchors=6, dtype=dtype)
    labels, weights = block_labels(data.input_ids, data.loss_mask, data.lengths, data.anchors, 4, 4.0)
    hidden = torch.randn((2, 6 * 3, 16), generator=generator(1), dtype=torch.float64).to(dtype).requires_grad_()
    return hidden, data.embedding, labels, weights


def dense(hidden, head, labels, weights):
    rows = hidden.double() @ head.double().T
    labels, weights = labels[:, :, 1:].flatten(), weights[:, :, 1:].flatten()
    each = torch.nn.functional.cross_entropy(rows.reshape(-1, rows.shape[-1]), labels, reduction="none")
    return (each * weights).sum()


@pytest.mark.parametrize("chunk", [1, 7, 12, 1000])
def test_loss_and_gradient_equal_dense_cross_entropy(chunk):
    hidden, head, labels, weights = tensors()
    head = head.requires_grad_()
    loss = block_loss(hidden, head, labels, weights, chunk=chunk)
    (loss.loss_sum / 3).backward()
    found, hidden.grad = hidden.grad, None
    wanted = dense(hidden, head.detach(), labels, weights)
    (wanted / 3).backward()
    assert loss.loss_sum.item() == pytest.approx(wanted.item(), rel=1e-6)
    # 1/3 arrives as a float32
    torch.testing.assert_close(found, hidden.grad, rtol=1e-6, atol=1e-12)
    assert head.grad is None
    logits = hidden.detach().view(2, 6, 3, 16)[:, :, 0] @ head.detach().T
    counted = weights[:, :, 1] > 0
    assert loss.first_slot_count.item() == counted.sum()
    assert loss.first_slot_correct.item() == ((logits.argmax(-1) == labels[:, :, 1]) & counted).sum()
    with torch.no_grad():
        quiet = block_loss(hidden, head, labels, weights, chunk=chunk)
    assert quiet.loss_sum.item() == loss.loss_sum.item()


def test_dpace_weighs_a_slot_by_what_hangs_on_it():
    # q' is 1 for a sure slot and 1/2 for one that is lost
    sure, lost = 0.0, math.inf
    neg_log = torch.tensor([[sure, sure, sure], [lost, sure, sure], [sure, lost, sure], [sure, lost, sure]])
    counts = torch.tensor([[True] * 3, [True] * 3, [True] * 3, [True, False, True]])
    wanted = [[3, 2, 1], [1.5, 1, 0.5], [2, 1, 0.5], [2, 0, 1]]
    assert dpace_weights(neg_log, counts).tolist() == wanted
    half = torch.full((1, 3), math.log(2))
    assert dpace_weights(half, counts[:1])[0].tolist() == pytest.approx(
        [0.75 + 0.75**2 + 0.75**3, 0.75**2 + 0.75**3, 0.75**3]
    )


def test_dpace_weights_carry_no_gradient_and_a_batchs_own_do_not_matter():
    hidden, head, labels, weights = tensors()
    neg_log = -(hidden.view(2, 6, 3, 16) @ head.T).log_softmax(-1).gather(-1, labels[:, :, 1:, None])[..., 0]
    made = dpace_weights(neg_log.flatten(0, 1), (weights[:, :, 1:] > 0).flatten(0, 1)).view(2, 6, 3)
    assert not made.requires_grad
    (neg_log * made).sum().backward()
    wanted, hidden.grad = hidden.grad, None
    loss = block_loss(hidden, head, labels, weights, chunk=5, loss_type="dpace")
    loss.loss_sum.backward()
    torch.testing.assert_close(hidden.grad, wanted, rtol=1e-9, atol=1e-12)
    assert loss.weight_sum.item() == pytest.approx(made.sum().item())
    same = block_loss(hidden, head, labels, (weights > 0).float(), chunk=5, loss_type="dpace")
    assert same.loss_sum.item() == loss.loss_sum.item()
    assert slot_decay("dpace", 16, None) == math.inf and slot_decay("dflash", 16, None) == 7.0
    assert slot_decay("dflash", 16, 3.0) == 3.0


def test_first_slots_that_are_right_are_counted():
    hidden, head, labels, weights = tensors()
    with torch.no_grad():
        hidden.view(2, 6, 3, 16)[:, :, 0] = 50 * torch.nn.functional.normalize(head, dim=1)[labels[:, :, 1]]
    normed = torch.nn.functional.normalize(head, dim=1)
    loss = block_loss(hidden, normed, labels, weights, chunk=5)
    assert loss.first_slot_correct.item() == loss.first_slot_count.item() > 0


def test_bfloat16_gradients_are_near_and_keep_the_callers_scale():
    hidden, head, labels, weights = tensors(torch.bfloat16)
    # 1.003 rounds to 1 in bfloat16: the scale must not be rounded on its own
    (block_loss(hidden, head, labels, weights, chunk=7).loss_sum * 1.003).backward()
    found, hidden.grad = hidden.grad, None
    (dense(hidden, head, labels, weights) * 1.003).backward()
    assert found.dtype == torch.bfloat16
    difference = (found.double() - hidden.grad.double()).norm() / hidden.grad.double().norm()
    assert difference < 0.01


def test_full_logits_never_exist():
    hidden, head, labels, weights = tensors()
    largest = 0

    class Largest(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            own = (
                isinstance(out, torch.Tensor) and out.untyped_storage().data_ptr() != head.untyped_storage().data_ptr()
            )
            if own and out.shape[-1:] == (40,) and out.ndim == 2:
                largest = max(largest, out.shape[0])
            return out

    with Largest():
        block_loss(hidden, head, labels, weights, chunk=8).loss_sum.backward()
    assert largest == 8


def test_a_head_of_another_dtype_is_refused():
    hidden, head, labels, weights = tensors()
    with pytest.raises(ValueError, match="cast the head once"):
        block_loss(hidden, head.float(), labels, weights)
