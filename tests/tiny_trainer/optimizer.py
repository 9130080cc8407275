"""AdamW with clipping, on lists, and the cosine schedule."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .model import Parameters, zeros
from .settings import Training


def learning_rate(training: Training, step: int) -> float:
    """Return the rate of step 1, 2, …: linear warm-up, then cosine to zero."""
    warm = max(1, round(training.warmup_ratio * training.steps))
    if step <= warm:
        return training.learning_rate * step / warm
    done = (step - warm) / max(1, training.steps - warm)
    return training.learning_rate * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


def norm(gradient: Parameters) -> float:
    """Return the L2 norm over all parameters."""
    return math.sqrt(math.fsum(value * value for values in gradient.values() for value in values))


@dataclass
class AdamW:
    """Moments of one replica; `step` counts the updates done."""

    training: Training
    first: Parameters
    second: Parameters
    step: int = 0

    @classmethod
    def fresh(cls, training: Training, parameters: Parameters) -> AdamW:
        """Start with zero moments."""
        return cls(training, zeros(parameters), zeros(parameters))

    def update(self, parameters: Parameters, gradient: Parameters, rate: float) -> None:
        """Apply one update in place."""
        self.step += 1
        beta1, beta2 = self.training.betas
        size = norm(gradient)
        scale = min(1.0, self.training.clip / size) if size > 0 else 1.0
        correct1, correct2 = 1 - beta1**self.step, 1 - beta2**self.step
        for name, values in parameters.items():
            first, second = self.first[name], self.second[name]
            for index, raw in enumerate(gradient[name]):
                value = raw * scale
                first[index] = beta1 * first[index] + (1 - beta1) * value
                second[index] = beta2 * second[index] + (1 - beta2) * value * value
                move = (first[index] / correct1) / (math.sqrt(second[index] / correct2) + 1e-8)
                values[index] -= rate * (move + self.training.weight_decay * values[index])
