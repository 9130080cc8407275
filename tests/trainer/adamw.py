"""AdamW by the book, in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

BETAS, DECAY, CLIP, RATE = (0.9, 0.95), 0.1, 0.5, 1e-2
EVEN = [(64, 48), (16,), (5, 4096)]
ODD = [(7,), (1,), (13, 5), (4097,), (64, 48)]


def by_the_book(
    start: Sequence[Tensor], steps: Sequence[Sequence[Tensor]], kept: Callable[[Tensor], Tensor] = lambda exact: exact
) -> tuple[list[Tensor], list[float]]:
    """Parameters in float64 after the steps, and each step's norm. `kept`: how values and moments are stored."""
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
            for each in (p, m, v):
                each.copy_(kept(each))
    return parameters, norms
