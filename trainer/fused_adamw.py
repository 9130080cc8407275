"""Clip, AdamW and the copy into bfloat16 parameters in one pass over memory, for all parameters of a replica at once.

torch's fused AdamW wants gradients in the masters' dtype and clipped before, and leaves the parameters to be written
after: five passes, half of a small drafter's step (benchmarks/results/2026-11-30-h200-steps). Here each gradient is
read once for the norm and once for the update. Two Triton kernels over a table of addresses, so that the number of
tensors costs no launches. The order of every sum is fixed: replicas stay equal bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_CHUNK = 4096
_WARPS = 8
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
def _update(  # type: ignore[no-untyped-def]  # noqa: PLR0917
    gradients,
    table,
    owner,
    start,
    sizes,
    scale,
    rate,
    step,
    count,
    beta1: tl.constexpr,
    beta2: tl.constexpr,
    log1: tl.constexpr,
    log2: tl.constexpr,
    decay: tl.constexpr,
    epsilon: tl.constexpr,
    kind: tl.constexpr,
    narrow: tl.constexpr,
    whole: tl.constexpr,
    span: tl.constexpr,
):
    chunk = tl.program_id(0)
    which = tl.load(owner + chunk)
    first = tl.multiple_of(tl.load(start + chunk), span)
    size = tl.load(sizes + which)
    gradient = tl.load(gradients + which).to(tl.pointer_type(kind))
    master = tl.load(table + which).to(tl.pointer_type(tl.float32))
    mean = tl.load(table + count + which).to(tl.pointer_type(tl.float32))
    square = tl.load(table + 2 * count + which).to(tl.pointer_type(tl.float32))
    if whole:
        gradient = tl.multiple_of(gradient, 16)
        master = tl.multiple_of(master, 16)
        mean = tl.multiple_of(mean, 16)
        square = tl.multiple_of(square, 16)
        size = tl.multiple_of(size, 16)
    place = first + tl.arange(0, span)
    inside = place < size
    # in float64: a float32's 1 - beta ** step has lost digits where step is small
    steps = tl.load(step).to(tl.float64)
    bias1 = (1.0 - tl.exp(steps * log1)).to(tl.float32)
    bias2 = tl.sqrt((1.0 - tl.exp(steps * log2)).to(tl.float32))
    speed = tl.load(rate)
    g = tl.load(gradient + place, mask=inside, other=0.0).to(tl.float32) * tl.load(scale)
    p = tl.load(master + place, mask=inside, other=0.0)
    m = tl.load(mean + place, mask=inside, other=0.0)
    v = tl.load(square + place, mask=inside, other=0.0)
    p = p - speed * decay * p
    m = m + (1.0 - beta1) * (g - m)
    v = beta2 * v + (1.0 - beta2) * g * g
    p = p - speed / bias1 * m / (tl.sqrt(v) / bias2 + epsilon)
    tl.store(master + place, p, mask=inside)
    tl.store(mean + place, m, mask=inside)
    tl.store(square + place, v, mask=inside)
    if narrow:
        parameter = tl.load(table + 3 * count + which).to(tl.pointer_type(kind))
        if whole:
            parameter = tl.multiple_of(parameter, 16)
        tl.store(parameter + place, p.to(kind), mask=inside)


class FusedAdamW:
    """One replica's update on one GPU. The tensors are read and written where they lie, and must stay there.

    `masters`, `means` and `squares` are float32; `parameters` of the gradients' dtype, or empty where the masters are
    the parameters themselves. All contiguous. `norm` says which gradients the next `update` takes.
    """

    def __init__(
        self,
        masters: Sequence[Tensor],
        means: Sequence[Tensor],
        squares: Sequence[Tensor],
        parameters: Sequence[Tensor],
    ) -> None:
        rows = [masters, means, squares, *([parameters] if parameters else [])]
        device, dtype = masters[0].device, (parameters or masters)[0].dtype
        sizes = [each.numel() for each in masters]
        starts = [list(range(0, size, _CHUNK)) for size in sizes]
        addresses = [_address(each) for row in rows for each in row]
        self._dtype = dtype
        self._kind: Any = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}[dtype]
        self._narrow = bool(parameters)
        self._even = _even([*addresses, *sizes])
        self._count = len(sizes)
        self._chunks = sum(len(each) for each in starts)
        self._table = torch.tensor(addresses, dtype=torch.int64, device=device)
        self._sizes = torch.tensor(sizes, dtype=torch.int64, device=device)
        self._owner = torch.tensor(
            [index for index, each in enumerate(starts) for _ in each], dtype=torch.int32, device=device
        )
        self._start = torch.tensor([one for each in starts for one in each], dtype=torch.int64, device=device)
        self._partial = torch.empty(self._chunks, dtype=torch.float32, device=device)
        self._given: list[int] = []
        self._whole = False
        self._recorded = False
        self._gradients = torch.empty(self._count, dtype=torch.int64, device=device)
        self._on_host = torch.empty(self._count, dtype=torch.int64, pin_memory=True)

    def norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """Of all gradients together, 0-dim float32. Raises ValueError where a recorded update reads other ones."""
        self._point_at(gradients)
        _squares[(self._chunks,)](
            self._gradients, self._owner, self._start, self._sizes, self._partial,
            kind=self._kind, whole=self._whole, span=_CHUNK, num_warps=_WARPS,
        )  # fmt: skip
        return self._partial.sum().sqrt()

    def _point_at(self, gradients: Sequence[Tensor]) -> None:
        addresses = [_address(each) for each in gradients]
        capturing = torch.cuda.is_current_stream_capturing()
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

    def update(
        self, scale: Tensor, rate: Tensor, step: Tensor, *, betas: tuple[float, float], decay: float, epsilon: float
    ) -> None:
        """AdamW (arXiv:1711.05101) on gradients x `scale`; `step`, from 1, counts this one. All three 0-dim float32."""
        _update[(self._chunks,)](
            self._gradients, self._table, self._owner, self._start, self._sizes, scale, rate, step, self._count,
            beta1=betas[0], beta2=betas[1], log1=_log(betas[0]), log2=_log(betas[1]),
            decay=decay, epsilon=epsilon,
            kind=self._kind, narrow=self._narrow, whole=self._whole, span=_CHUNK, num_warps=_WARPS,
        )  # fmt: skip


def _address(tensor: Tensor) -> int:
    if not tensor.is_contiguous():
        raise ValueError("the update in one pass takes contiguous tensors")
    return tensor.data_ptr()


def _even(numbers: Sequence[int]) -> bool:
    return all(each % _ALIGNED == 0 for each in numbers)


def _log(beta: float) -> float:
    """Of 0 as well: its powers are 0."""
    return math.log(max(beta, 1e-300))
