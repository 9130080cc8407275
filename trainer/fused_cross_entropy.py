"""Cross-entropy of given logits and its gradient in two passes over a row: a Triton kernel, one program a row.

The first pass reads a row's logits for their maximum and the sum of their exponentials at once, the second writes the
gradient over them, in their own dtype, or (for `trainer.fp8`) probabilities as 8-bit floats beside them. Torch's own
operations read them more often, and write a second array.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from trainer.fp8 import SHARE

_LANES, _WARPS = 512, 8
_BYTES = 16
"""A row is read in tiles of so many lanes, and a lane reads so many bytes at once: one load of one thread. It has a
maximum and a sum of its own, so that nothing waits for another thread until the row's end."""


@triton.jit(do_not_specialize=["firsts"])
def _rows(  # type: ignore[no-untyped-def]  # noqa: PLR0917
    logits,
    gradient,
    labels,
    losses,
    hits,
    stride,
    words,
    firsts,
    share_scale,
    kind: tl.constexpr,
    lanes: tl.constexpr,
    each: tl.constexpr,
):
    row = tl.program_id(0)
    here = logits + row.to(tl.int64) * stride
    label = tl.load(labels + row)
    # a label that is no word has no loss: reading past the row would give it one
    own = tl.load(here + label, mask=(label >= 0) & (label < words), other=float("nan")).to(tl.float32)
    label = label.to(tl.int32)
    tile = tl.arange(0, lanes)[:, None] * each + tl.arange(0, each)[None, :]
    # finite: of two infinities the difference is none
    top = tl.full([lanes], -3.4028234663852886e38, tl.float32)
    total = tl.zeros([lanes], tl.float32)
    for first in range(0, words, lanes * each):
        place = first + tile
        value = tl.load(here + place, mask=place < words, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(top, tl.max(value, axis=1))
        total = total * tl.exp(top - higher) + tl.sum(tl.exp(value - higher[:, None]), axis=1)
        top = higher
    highest = tl.max(top, axis=0)
    log_sum = highest + tl.log(tl.sum(total * tl.exp(top - highest), axis=0))
    tl.store(losses + row, log_sum - own)
    # of equal logits the first is the most likely: only a label that is one of the highest has to look before it
    end = tl.where((row < firsts) & (own == highest), label, 0)
    before = tl.zeros([lanes, each], tl.int32)
    for first in range(0, end, lanes * each):
        place = first + tile
        value = tl.load(here + place, mask=place < end, other=float("-inf")).to(tl.float32)
        before += (value == own).to(tl.int32)
    tl.store(hits + row, (own == highest) & (tl.sum(before) == 0), mask=row < firsts)
    if kind != "none":
        there = gradient + row.to(tl.int64) * words if kind == "shares" else here
        # whoever has not read the label's logit yet would find the gradient there
        tl.debug_barrier()
        for first in range(0, words, lanes * each):
            place = first + tile
            inside = place < words
            share = tl.exp(tl.load(here + place, mask=inside, other=0.0).to(tl.float32) - log_sum)
            if kind == "shares":
                share = tl.where(place == label, 0.0, share * share_scale)
            else:
                share = tl.where(place == label, share - 1.0, share)
            tl.store(there + place, share.to(there.dtype.element_ty), mask=inside)


@torch.library.custom_op("dflash::cross_entropy_", mutates_args=("logits",))
def cross_entropy_(logits: Tensor, labels: Tensor, firsts: int, with_gradient: bool) -> tuple[Tensor, Tensor]:
    """-log p(label) of each row, float32 [R], and whether each of the first `firsts` rows is right, bool [firsts].

    `logits` [R, V] of any floating dtype up to float32, each row contiguous; `labels` long [R], a label outside 0 ..
    V - 1 gives NaN. Right is a row whose highest logit is the label's; of equal ones the first counts, as in argmax.
    With `with_gradient` the logits hold the losses' gradient by them afterwards: p, at the label p - 1, taken in
    float32 and rounded to their dtype. Without autograd. Raises ValueError for logits that it cannot read.
    """
    losses, hits = _outputs(logits, firsts)
    _launch(logits, logits, labels, losses, hits, firsts, "errors" if with_gradient else "none")
    return losses, hits


@torch.library.custom_op("dflash::cross_entropy_shares", mutates_args=())
def cross_entropy_shares(logits: Tensor, labels: Tensor, firsts: int) -> tuple[Tensor, Tensor, Tensor]:
    """As `cross_entropy_`, and `fp8.shares_of` the logits, which stay as they are."""
    losses, hits = _outputs(logits, firsts)
    shares = _shares(logits)
    _launch(logits, shares, labels, losses, hits, firsts, "shares")
    return losses, hits, shares


@cross_entropy_shares.register_fake
def _(logits: Tensor, labels: Tensor, firsts: int) -> tuple[Tensor, Tensor, Tensor]:
    return *_outputs(logits, firsts), _shares(logits)


def _launch(  # noqa: PLR0917 -- a kernel's
    logits: Tensor, gradient: Tensor, labels: Tensor, losses: Tensor, hits: Tensor, firsts: int, kind: str
) -> None:
    rows, words = logits.shape
    if logits.stride(1) != 1 or logits.dtype == torch.float64 or not labels.is_contiguous():
        raise ValueError(
            f"logits of {logits.dtype} with strides {logits.stride()}, labels with {labels.stride()}: contiguous rows "
            "and labels are needed, in float32 or narrower"
        )
    # a launch goes to the current device, whatever the tensors are on
    with torch.cuda.device_of(logits):
        _rows[(rows,)](
            logits, gradient, labels, losses, hits, logits.stride(0), words, firsts, SHARE,
            kind=kind, lanes=_LANES, each=_BYTES // logits.element_size(), num_warps=_WARPS,
        )  # fmt: skip


@cross_entropy_.register_fake
def _(logits: Tensor, labels: Tensor, firsts: int, with_gradient: bool) -> tuple[Tensor, Tensor]:
    return _outputs(logits, firsts)


def _shares(logits: Tensor) -> Tensor:
    return torch.empty(logits.shape, dtype=torch.float8_e5m2, device=logits.device)


def _outputs(logits: Tensor, firsts: int) -> tuple[Tensor, Tensor]:
    losses = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
    return losses, torch.empty(firsts, dtype=torch.bool, device=logits.device)
