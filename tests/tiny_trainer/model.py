"""The drafter: for each slot k of a block, logits = weight_k · hidden(anchor) + bias_k."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

Parameters = dict[str, list[float]]
"""Name -> flat values; `slots.K.weight` is [V, D] by rows, `slots.K.bias` is [V]."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a drafter."""

    vocabulary: int
    width: int
    block_size: int
    mask: int

    def parameters(self) -> dict[str, tuple[int, ...]]:
        """Return every parameter's shape by name."""
        shapes: dict[str, tuple[int, ...]] = {}
        for slot in range(1, self.block_size):
            shapes[f"slots.{slot}.weight"] = (self.vocabulary, self.width)
            shapes[f"slots.{slot}.bias"] = (self.vocabulary,)
        return shapes


@dataclass(frozen=True)
class Block:
    """One anchor's example: the target's hidden state there, and (label, weight) for slots 1 to B - 1."""

    hidden: list[float]
    labels: list[tuple[int, float]]


@dataclass
class StepOutput:
    """One worker's forward-backward: logits by (block, slot), sums, and the gradient of `loss_sum`."""

    outputs: list[list[float]]
    loss_sum: float
    weight_sum: float
    first_correct: int
    first_count: int
    gradient: Parameters


def fresh(shape: Shape, generator: random.Random) -> Parameters:
    """Draw N(0, 0.02) parameters from the given generator."""
    sizes = shape.parameters()
    return {name: [generator.gauss(0, 0.02) for _ in range(math.prod(sizes[name]))] for name in sizes}


def zeros(parameters: Parameters) -> Parameters:
    """Return zeros of the same names and sizes."""
    return {name: [0.0] * len(values) for name, values in parameters.items()}


def logits(parameters: Parameters, slot: int, hidden: list[float]) -> list[float]:
    """Return the V logits of one slot."""
    weight, bias = parameters[f"slots.{slot}.weight"], parameters[f"slots.{slot}.bias"]
    width = len(hidden)
    out = []
    for token, start in enumerate(bias):
        row = weight[token * width : (token + 1) * width]
        out.append(start + sum(w * h for w, h in zip(row, hidden)))
    return out


def forward_backward(parameters: Parameters, blocks: list[Block]) -> StepOutput:
    """Return outputs, weighted cross-entropy sum (nats) and its gradient over all blocks."""
    result = StepOutput([], 0.0, 0.0, 0, 0, zeros(parameters))
    for block in blocks:
        for slot, (label, weight) in enumerate(block.labels, 1):
            scores = logits(parameters, slot, block.hidden)
            result.outputs.append(scores)
            if not weight:
                continue
            top = max(scores)
            exps = [math.exp(score - top) for score in scores]
            total = sum(exps)
            result.loss_sum += weight * (math.log(total) + top - scores[label])
            result.weight_sum += weight
            if slot == 1:
                result.first_count += 1
                result.first_correct += scores[label] == top
            _backward(result.gradient, slot, block.hidden, label, [weight * exp / total for exp in exps], weight)
    return result


def _backward(
    gradient: Parameters, slot: int, hidden: list[float], label: int, error: list[float], weight: float
) -> None:
    error[label] -= weight
    rows, bias = gradient[f"slots.{slot}.weight"], gradient[f"slots.{slot}.bias"]
    width = len(hidden)
    for token, value in enumerate(error):
        bias[token] += value
        for index, entry in enumerate(hidden):
            rows[token * width + index] += value * entry


def add(into: StepOutput, other: StepOutput) -> None:
    """Accumulate another forward-backward of the same step."""
    into.outputs.extend(other.outputs)
    into.loss_sum += other.loss_sum
    into.weight_sum += other.weight_sum
    into.first_correct += other.first_correct
    into.first_count += other.first_count
    for name, values in other.gradient.items():
        mine = into.gradient[name]
        for index, value in enumerate(values):
            mine[index] += value
