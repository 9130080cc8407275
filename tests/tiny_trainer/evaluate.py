"""Speculative decoding of held-out prompts, and the held-out loss."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from .data import Row, answered, held_out
from .model import Parameters, Shape, forward_backward, logits
from .settings import Settings
from .target import Target
from .workers import decay_gamma, make_blocks


@dataclass(frozen=True)
class Evaluation:
    """`tau` is the mean over cycles of accepted + bonus; slot k is `accepted_by_position[k - 1]`."""

    loss: float
    first_slot_acceptance: float
    tau: float
    accepted_by_position: list[float]
    lossless: bool
    mismatches: list[dict[str, int]]

    def to_json(self) -> dict[str, Any]:
        """Return the fields of the contract's evaluation record."""
        return asdict(self)

    def summary(self) -> dict[str, float]:
        """Return what `result.json` keeps."""
        return {
            "loss": self.loss,
            "first_slot_acceptance": self.first_slot_acceptance,
            "tau": self.tau,
        }


def speculative(
    target: Target, parameters: Parameters, block_size: int, prompt: list[int], count: int
) -> tuple[list[int], list[int]]:
    """Decode up to `count` tokens; returns them and, for each cycle, how many drafts were accepted."""
    tokens = [target.next[prompt[-1]]]
    accepted = []
    while len(tokens) < count and tokens[-1] != target.eos:
        hidden = target.hidden[tokens[-1]]
        last, taken = tokens[-1], 0
        for slot in range(1, block_size):
            scores = logits(parameters, slot, hidden)
            draft = scores.index(max(scores))
            if last == target.eos or draft != target.next[last]:
                break
            tokens.append(draft)
            last, taken = draft, taken + 1
        if last != target.eos:
            tokens.append(target.next[last])
        accepted.append(taken)
    tokens = tokens[:count]
    if target.eos in tokens:
        tokens = tokens[: tokens.index(target.eos) + 1]
    return tokens, accepted


def evaluate(settings: Settings, target: Target, shape: Shape, parameters: Parameters) -> Evaluation | None:
    """Evaluate on the held-out prompts; None where there are none."""
    prompts = held_out(settings.training, target)
    if not prompts:
        return None
    count = settings.training.evaluation_tokens
    cycles: list[int] = []
    mismatches = []
    for number, prompt in enumerate(prompts):
        tokens, accepted = speculative(target, parameters, shape.block_size, prompt, count)
        cycles += accepted
        truth = target.answer(prompt, count)
        if tokens != truth:
            pairs = zip(tokens, truth)
            position = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(tokens), len(truth)))
            mismatches.append({"prompt": number, "position": position})
    by_position = [sum(taken >= slot for taken in cycles) / max(1, len(cycles)) for slot in range(1, shape.block_size)]
    rows = answered(prompts, target, settings.training.answer_tokens)
    return Evaluation(
        loss=_loss(settings, target, shape, parameters, rows),
        first_slot_acceptance=by_position[0],
        tau=sum(taken + 1 for taken in cycles) / len(cycles) if cycles else 1.0,
        accepted_by_position=by_position,
        lossless=not mismatches,
        mismatches=mismatches,
    )


def _loss(settings: Settings, target: Target, shape: Shape, parameters: Parameters, rows: list[Row]) -> float:
    gamma = decay_gamma(settings.training, shape.block_size)
    blocks = [block for row in rows for block in make_blocks(row, row.anchors(), target, shape.block_size, gamma)]
    result = forward_backward(parameters, blocks)
    return result.loss_sum / result.weight_sum if result.weight_sum else 0.0
