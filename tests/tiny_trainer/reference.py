"""A slow, plain recomputation by one thread, written apart from `model.py`, for the canary."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from .model import Block, Parameters
from .settings import Training


@dataclass(frozen=True)
class Reference:
    """Outputs by (block, slot), the weighted loss and weight sums, and the gradient of the loss sum."""

    outputs: list[list[float]]
    loss_sum: float
    weight_sum: float
    gradient: Parameters


def recompute(parameters: Parameters, blocks: list[Block], backwards: bool = False) -> Reference:
    """Recompute one batch; `backwards` sums in reverse order, to measure what rounding alone does."""
    order = range(len(blocks) - 1, -1, -1) if backwards else range(len(blocks))
    outputs: dict[tuple[int, int], list[float]] = {}
    losses, weights = [], []
    terms: dict[str, list[list[float]]] = {name: [[] for _ in values] for name, values in parameters.items()}
    for number in order:
        block = blocks[number]
        for slot, (label, weight) in enumerate(block.labels, 1):
            matrix, bias = parameters[f"slots.{slot}.weight"], parameters[f"slots.{slot}.bias"]
            width = len(block.hidden)
            score = [
                _sum(
                    [matrix[token * width + i] * block.hidden[i] for i in range(width)] + [bias[token]],
                    backwards,
                )
                for token in range(len(bias))
            ]
            outputs[number, slot] = score
            total = _sum([math.exp(value) for value in score], backwards)
            losses.append(weight * (math.log(total) - score[label]))
            weights.append(weight)
            for token, value in enumerate(score):
                error = weight * (math.exp(value) / total - (token == label))
                terms[f"slots.{slot}.bias"][token].append(error)
                for i in range(width):
                    terms[f"slots.{slot}.weight"][token * width + i].append(error * block.hidden[i])
    return Reference(
        [outputs[key] for key in sorted(outputs)],
        _sum(losses, backwards),
        _sum(weights, backwards),
        {name: [_sum(values, backwards) for values in terms[name]] for name in terms},
    )


def _sum(values: list[float], backwards: bool) -> float:
    return sum(reversed(values)) if backwards else math.fsum(values)


def mean_gradient(references: list[Reference]) -> Parameters:
    """Return the gradient of the weighted mean loss over all workers."""
    weight = math.fsum(reference.weight_sum for reference in references)
    return {
        name: [math.fsum(column) / weight for column in zip(*(r.gradient[name] for r in references))]
        for name in references[0].gradient
    }


@dataclass
class ReferenceAdamW:
    """The update rule of AdamW with clipping, one value at a time."""

    training: Training
    history: list[Parameters]

    def update(self, parameters: Parameters, gradient: Parameters, rate: float) -> Parameters:
        """Return new parameters; moments are recomputed from the whole history of clipped gradients."""
        norm = math.sqrt(math.fsum(v * v for values in gradient.values() for v in values))
        scale = min(1.0, self.training.clip / norm) if norm else 1.0
        self.history.append({name: [v * scale for v in values] for name, values in gradient.items()})
        return {
            name: [self._value(name, index, value, rate) for index, value in enumerate(values)]
            for name, values in parameters.items()
        }

    def _value(self, name: str, index: int, value: float, rate: float) -> float:
        beta1, beta2 = self.training.betas
        past = [gradient[name][index] for gradient in reversed(self.history)]
        first = _decayed(past, beta1)
        second = _decayed((entry * entry for entry in past), beta2)
        return value - rate * (first / (math.sqrt(second) + 1e-8) + self.training.weight_decay * value)


def _decayed(past: Iterable[float], beta: float) -> float:
    """Return the bias-corrected moving average; the newest value comes first."""
    weighted = [((1 - beta) * beta**age, entry) for age, entry in enumerate(past)]
    return math.fsum(weight * entry for weight, entry in weighted) / (1 - beta ** len(weighted))
