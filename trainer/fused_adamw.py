"""Clip, AdamW and the copy into bfloat16 parameters in one pass over memory, for all parameters of a replica at once.

torch's fused AdamW wants gradients in the masters' dtype and clipped before, and leaves the parameters to be written
after: five passes, half of a small drafter's step (docs/decisions/0022). Here each gradient is read once for the norm
and once for the update. Three Triton kernels over a table of addresses, so that the number of tensors costs no
launches. The order of every sum is fixed: replicas stay equal bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_NORM_SPAN, _UPDATE_SPAN, _FINISH_SPAN = 8192, 1024, 4096
"""Elements that a program reads at once. The fastest measured for the two passes; the partial sums of the first must
not be many, since one program adds them up."""
_WARPS = 4
_KINDS: dict[torch.dtype, Any] = {
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
}
_ALIGNED = 16
"""Bytes, and elements, in which every tensor begins and ends where the kernels may read whole vectors."""


@triton.jit
def _squares(gradients, owner, start, sizes, partial, kind: tl.constexpr, whole: tl.constexpr, span: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: PLR0917
    chunk = tl.program_id(0)
    which = tl.load(owner + chunk)
    first = tl.multiple_of(tl.load(start + chunk), span)
    size = tl.load(sizes + which)
    source = tl.load(gradients + which).to(tl.pointer_type(kind))
    if whole:
        source = tl.multiple_of(source, 16)
        size = tl.multiple_of(size, 16)
    place = first + tl.arange(0, span)
    value = tl.load(source + place, mask=place < size, other=0.0).to(tl.float32)
    tl.store(partial + chunk, tl.sum(value * value))


@triton.jit
def _finish(  # type: ignore[no-untyped-def]  # noqa: PLR0917
    partial,
    chunks,
    norm,
    rate,
    steps,
    count,
    numbers,
    log1: tl.constexpr,
    log2: tl.constexpr,
    clip: tl.constexpr,
    epsilon: tl.constexpr,
    span: tl.constexpr,
):
    lane = tl.arange(0, span)
    total = tl.zeros([span], tl.float32)
    for first in range(0, chunks, span):
        total += tl.load(partial + first + lane, mask=first + lane < chunks, other=0.0)
    found = tl.sqrt(tl.sum(total))
    tl.store(norm, found)
    share = clip / (found + epsilon)
    # not a minimum, which would take the number where the norm is none
    tl.store(numbers, tl.where(share > 1.0, 1.0, share))
    # in float64: a float32's 1 - beta ** step has lost digits where step is small
    taken = tl.load(steps).to(tl.float64) + 1.0
    tl.store(numbers + 1, tl.load(rate) / (1.0 - tl.exp(taken * log1)).to(tl.float32))
    tl.store(numbers + 2, tl.sqrt((1.0 - tl.exp(taken * log2)).to(tl.float32)))
    tl.debug_barrier()
    for first in range(0, count, span):
        here = first + lane < count
        tl.store(steps + first + lane, tl.load(steps + first + lane, mask=here) + 1.0, mask=here)


@triton.jit
def _update(  # type: ignore[no-untyped-def]  # noqa: PLR0917
    gradients,
    table,
    owner,
    start,
    sizes,
    numbers,
    rate,
    count,
    beta1: tl.constexpr,
    beta2: tl.constexpr,
    decay: tl.constexpr,
    epsilon: tl.constexpr,
    kind: tl.constexpr,
    kept: tl.constexpr,
    narrow: tl.constexpr,
    whole: tl.constexpr,
    span: tl.constexpr,
):
    chunk = tl.program_id(0)
    which = tl.load(owner + chunk)
    first = tl.multiple_of(tl.load(start + chunk), span)
    size = tl.load(sizes + which)
    gradient = tl.load(gradients + which).to(tl.pointer_type(kind))
    master = tl.load(table + which).to(tl.pointer_type(kept))
    mean = tl.load(table + count + which).to(tl.pointer_type(kept))
    square = tl.load(table + 2 * count + which).to(tl.pointer_type(kept))
    if whole:
        gradient = tl.multiple_of(gradient, 16)
        master = tl.multiple_of(master, 16)
        mean = tl.multiple_of(mean, 16)
        square = tl.multiple_of(square, 16)
        size = tl.multiple_of(size, 16)
    place = first + tl.arange(0, span)
    inside = place < size
    g = tl.load(gradient + place, mask=inside, other=0.0).to(tl.float32) * tl.load(numbers)
    p = tl.load(master + place, mask=inside, other=0.0).to(tl.float32)
    m = tl.load(mean + place, mask=inside, other=0.0).to(tl.float32)
    v = tl.load(square + place, mask=inside, other=0.0).to(tl.float32)
    p = p - tl.load(rate) * decay * p
    m = m + (1.0 - beta1) * (g - m)
    v = beta2 * v + (1.0 - beta2) * g * g
    p = p - tl.load(numbers + 1) * m / (tl.sqrt(v) / tl.load(numbers + 2) + epsilon)
    tl.store(master + place, p.to(kept), mask=inside)
    tl.store(mean + place, m.to(kept), mask=inside)
    tl.store(square + place, v.to(kept), mask=inside)
    if narrow:
        parameter = tl.load(table + 3 * count + which).to(tl.pointer_type(kind))
        if whole:
            parameter = tl.multiple_of(parameter, 16)
        tl.store(parameter + place, p.to(kind), mask=inside)


class FusedAdamW:
    """One replica's update on one GPU. The tensors are read and written where they lie, and must stay there.

    `masters`, `means` and `squares` are float32 and `parameters` of the gradients' dtype; or `parameters` is empty: the
    masters are the parameters themselves, and all are of the gradients' dtype. The arithmetic is float32's either way.
    `steps` float32 [number of tensors], how often each was updated. All contiguous.
    """

    def __init__(
        self,
        masters: Sequence[Tensor],
        means: Sequence[Tensor],
        squares: Sequence[Tensor],
        parameters: Sequence[Tensor],
        steps: Tensor,
    ) -> None:
        kept = {each.dtype for each in (*masters, *means, *squares)}
        if len(kept) > 1 or (parameters and kept != {torch.float32}):
            raise ValueError("masters and moments are needed in one dtype, which is float32 where they are copies")
        rows = [masters, means, squares, *([parameters] if parameters else [])]
        device, dtype = masters[0].device, (parameters or masters)[0].dtype
        sizes = [each.numel() for each in masters]
        addresses = [_address(each) for row in rows for each in row]
        self._dtype = dtype
        self._kind, self._kept = _KINDS[dtype], _KINDS[masters[0].dtype]
        self._narrow = bool(parameters)
        self._even = _even([*addresses, *sizes])
        self._count = len(sizes)
        self._table = torch.tensor(addresses, dtype=torch.int64, device=device)
        self._sizes = torch.tensor(sizes, dtype=torch.int64, device=device)
        self._for_norm, self._for_update = (_Chunks(sizes, each, device) for each in (_NORM_SPAN, _UPDATE_SPAN))
        self._steps = steps
        # what `_finish` tells `_update`: scale of the gradients, rate / bias of the mean, root of the square's bias
        self._numbers = torch.empty(3, dtype=torch.float32, device=device)
        self._partial = torch.empty(self._for_norm.count, dtype=torch.float32, device=device)
        self._given: list[int] = []
        self._whole = False
        self._recorded = False
        self._gradients = torch.empty(self._count, dtype=torch.int64, device=device)
        self._on_host = torch.empty(self._count, dtype=torch.int64, pin_memory=device.type == "cuda")

    def step(
        self,
        gradients: Sequence[Tensor],
        rate: Tensor,
        *,
        betas: tuple[float, float],
        decay: float,
        clip: float,
        epsilon: float,
        clip_epsilon: float,
    ) -> Tensor:
        """AdamW (arXiv:1711.05101) on gradients clipped to a norm of `clip`; the norm before (0-dim float32).

        `rate`: 0-dim float32. Raises ValueError where a recorded step reads other gradients.
        """
        self._point_at(gradients)
        norm = torch.empty_like(rate)
        chunks = self._for_norm
        _squares[(chunks.count,)](
            self._gradients, chunks.owner, chunks.start, self._sizes, self._partial,
            kind=self._kind, whole=self._whole, span=_NORM_SPAN, num_warps=_WARPS,
        )  # fmt: skip
        _finish[(1,)](
            self._partial, chunks.count, norm, rate, self._steps, self._count, self._numbers,
            log1=_log(betas[0]), log2=_log(betas[1]), clip=clip, epsilon=clip_epsilon,
            span=_FINISH_SPAN, num_warps=_WARPS,
        )  # fmt: skip
        chunks = self._for_update
        _update[(chunks.count,)](
            self._gradients, self._table, chunks.owner, chunks.start, self._sizes,
            self._numbers, rate, self._count,
            beta1=betas[0], beta2=betas[1], decay=decay, epsilon=epsilon,
            kind=self._kind, kept=self._kept, narrow=self._narrow, whole=self._whole,
            span=_UPDATE_SPAN, num_warps=_WARPS,
        )  # fmt: skip
        return norm

    def _point_at(self, gradients: Sequence[Tensor]) -> None:
        addresses = [_address(each) for each in gradients]
        capturing = self._gradients.is_cuda and torch.cuda.is_current_stream_capturing()
        if addresses != self._given:
            if self._recorded:
                raise ValueError("the gradients are not where the recorded update reads them")
            if any(each.dtype != self._dtype for each in gradients):
                raise ValueError(f"gradients are needed in {self._dtype}, as the parameters")
            self._given, self._whole = addresses, self._even and _even(addresses)
            # a capture takes copies from pinned memory only, and each replay makes them again
            where = self._on_host.copy_(torch.tensor(addresses)) if capturing else torch.tensor(addresses)
            self._gradients.copy_(where, non_blocking=capturing)
        self._recorded = self._recorded or capturing


class _Chunks:
    """All tensors' elements in pieces of at most `span`: of each piece its tensor and its first element there."""

    def __init__(self, sizes: Sequence[int], span: int, device: torch.device) -> None:
        pieces = -(torch.tensor(sizes).neg() // span)
        owner = torch.repeat_interleave(torch.arange(len(sizes)), pieces)
        first = (pieces.cumsum(0) - pieces)[owner]
        self.count = len(owner)
        self.owner = owner.to(torch.int32).to(device)
        self.start = ((torch.arange(self.count) - first) * span).to(device)


def _address(tensor: Tensor) -> int:
    if not tensor.is_contiguous():
        raise ValueError("the update in one pass takes contiguous tensors")
    return tensor.data_ptr()


def _even(numbers: Sequence[int]) -> bool:
    return all(each % _ALIGNED == 0 for each in numbers)


def _log(beta: float) -> float:
    """Of 0 as well: its powers are 0."""
    return math.log(max(beta, 1e-300))
