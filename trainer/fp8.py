"""Products of 8-bit floating-point numbers: linear layers, and the frozen head.

Numbers are e4m3 (4 bits of exponent, 3 of mantissa) with a float32 scale for each row: what one row is rounded to does
not depend on any other, so blocks may go through in any groups. A linear layer has two such products, its output and
its input's gradient; the gradient of its weight stays in the layer's dtype (as torchao's `rowwise_with_gw_hp`).

Quantisation is plain torch code, which the compiler fuses with what comes before it; the products are operators. On a
GPU they are `torch._scaled_mm` for bfloat16. Everywhere else, and in float32 and float64, what the 8-bit numbers stand
for is multiplied: the same values but for the order of their sums.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

MULTIPLE = 16
"""Widths that a GPU multiplies are multiples of it."""
SHARE = 2.0**15
"""What probabilities are multiplied by before they are e5m2: from 1 down to 2e-9 they keep all its digits."""
_LARGEST, _LEAST = 448.0, 1e-30


def quantised(rows: Tensor) -> tuple[Tensor, Tensor]:
    """`rows` [..., K] as e4m3, and what each row is to be multiplied by, float32 [..., 1]; without gradient.

    Always in float32: wherever it is computed, equal numbers give equal ones. What is not finite gives NaN.
    """
    wide = rows.detach().to(torch.float32)
    scale = wide.abs().amax(dim=-1, keepdim=True).clamp(min=_LEAST) / _LARGEST
    return (wide / scale).clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn).contiguous(), scale


def linear(inputs: Tensor, weight: Tensor) -> Tensor:
    """`inputs` [..., K] times `weight` [N, K] transposed, in their dtype, both quantised by rows.

    The input's gradient is that of the quantised weight, from gradients that are quantised by rows too; the weight's
    is exact (the quantisation of inputs and weight counts as the identity).
    """
    rows = inputs.flatten(0, -2)
    return _linear(rows, weight, *quantised(rows), *quantised(weight)).unflatten(0, inputs.shape[:-1])


@dataclass(frozen=True)
class NarrowHead:
    """A frozen head as e4m3, once for each of its two products, [V, D] and [D, V], and the scale of all its numbers.

    `scale` is 0-dim float32, `scales` the same for each word, [V, 1].
    """

    words: Tensor
    turned: Tensor
    scale: Tensor
    scales: Tensor

    @staticmethod
    def of(weight: Tensor) -> NarrowHead:
        """Of `weight` [V, D], on its device; in pieces, since float32 copies of a real head are gigabytes."""
        scale = weight.detach().abs().amax().float().clamp(min=_LEAST) / _LARGEST
        words = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
        for into, part in zip(words.split(8192), weight.detach().split(8192), strict=True):
            into.copy_((part.float() / scale).clamp(-_LARGEST, _LARGEST))
        return NarrowHead(words, words.t().contiguous(), scale, scale.expand(len(words), 1).contiguous())

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All of it."""
        return self.words, self.turned, self.scale, self.scales

    def logits(self, rows: Tensor) -> Tensor:
        """[R, V] of `rows` [R, D], in their dtype."""
        return _product(*quantised(rows), self.words, self.scales, rows.dtype, True)

    def gradient(self, shares: Tensor, losses: Tensor, labels: Tensor, dtype: torch.dtype) -> Tensor:
        """The gradient [R, D] of `losses` [R] by the rows, from `shares_of` them.

        The label's own part, p - 1, is taken from the loss: 8 bits would leave nothing of it in a confident row.
        """
        unit = torch.full((), 1.0 / SHARE, dtype=torch.float32, device=shares.device)
        # its sum is over the whole vocabulary: too long for the fast, short accumulator
        others = _product(shares, unit, self.turned, self.scale, dtype, False)
        wide = torch.promote_types(dtype, torch.float32)
        # as bytes: not every device can pick rows of 8-bit floats
        own = self.words.view(torch.uint8)[labels].view(torch.float8_e4m3fn).to(wide) * self.scale
        return (others.to(wide) + torch.expm1(-losses.to(wide))[:, None] * own).to(dtype)


def shares_of(logits: Tensor, log_sum: Tensor, labels: Tensor) -> Tensor:
    """Each word's probability times SHARE as e5m2, [R, V], 0 at the labels; `log_sum` [R] of the `logits` [R, V]."""
    at_label = torch.arange(logits.shape[1], device=logits.device) == labels[:, None]
    shares = (logits - log_sum[:, None]).exp().to(torch.float32) * SHARE
    return shares.masked_fill(at_label, 0.0).to(torch.float8_e5m2)


def _multiplied(  # noqa: PLR0917 -- an operator's
    left: Tensor, left_scale: Tensor, right: Tensor, right_scale: Tensor, dtype: torch.dtype, fast: bool
) -> Tensor:
    """`left` [M, K] times `right` [N, K] transposed. Scales are of rows, [M, 1] and [N, 1], or both 0-dim."""
    if left.is_cuda and dtype == torch.bfloat16:
        scale = right_scale.t() if right_scale.ndim else right_scale
        return torch._scaled_mm(
            left, right.t(), scale_a=left_scale, scale_b=scale, out_dtype=dtype, use_fast_accum=fast
        )
    wide = torch.promote_types(dtype, torch.float32)
    return ((left.to(wide) * left_scale.to(wide)) @ (right.to(wide) * right_scale.to(wide)).t()).to(dtype)


@torch.library.custom_op("dflash::fp8_product", mutates_args=())
def _product(  # noqa: PLR0917 -- an operator's
    left: Tensor, left_scale: Tensor, right: Tensor, right_scale: Tensor, dtype: torch.dtype, fast: bool
) -> Tensor:
    return _multiplied(left, left_scale, right, right_scale, dtype, fast)


@_product.register_fake
def _(
    left: Tensor, _left_scale: Tensor, right: Tensor, _right_scale: Tensor, dtype: torch.dtype, _fast: bool
) -> Tensor:
    return left.new_empty((left.shape[0], right.shape[0]), dtype=dtype)


# an operator with a gradient of its own, not an `autograd.Function`, which torch 2.11 compiled to gradients of zero
@torch.library.custom_op("dflash::fp8_linear", mutates_args=())
def _linear(  # noqa: PLR0917 -- an operator's
    rows: Tensor, weight: Tensor, narrow: Tensor, scale: Tensor, narrow_weight: Tensor, weight_scale: Tensor
) -> Tensor:
    """The product of the two quantised; `rows` and `weight` are what it has gradients of."""
    return _multiplied(narrow, scale, narrow_weight, weight_scale, rows.dtype, True)


@_linear.register_fake
def _(rows: Tensor, weight: Tensor, *_quantised: Tensor) -> Tensor:
    return rows.new_empty((rows.shape[0], weight.shape[0]))


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    rows, _weight, _narrow, _scale, narrow_weight, weight_scale = inputs
    ctx.save_for_backward(rows, narrow_weight, weight_scale)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    rows, weight, weight_scale = ctx.saved_tensors
    # the weight's scales lie along the sum here: they go into the gradient, and the weight need not be quantised anew
    narrow, scale = quantised(gradient.to(torch.float32) * weight_scale.t())
    turned = weight.t().contiguous()
    ones = torch.ones((turned.shape[0], 1), dtype=torch.float32, device=turned.device)
    to_rows = _product(narrow, scale, turned, ones, rows.dtype, True)
    return to_rows, gradient.t() @ rows, None, None, None, None


_linear.register_autograd(_backward, setup_context=_keep)
