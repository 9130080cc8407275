"""Judge a drafter as it is used: speculative decoding of held-out prompts against its own target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.decode import Cycle, TargetModel, acceptance_by_position, greedy_steps, mean_tau, speculative_decode
from trainer.dflash_model import DFlashDrafter
from trainer.errors import InputError


@dataclass(frozen=True)
class Mismatch:
    """The first token of one text at which speculative decoding left the target's own greedy text.

    `prompt`: index of the prompt. `position`: index of the new token. `margin`: by how much the target, decoding one
    token at a time, put its own token before the speculative one (logits; the top-two margin when the latter is its
    second choice). `tolerance`: twice the largest difference of a logit between verifying the target's greedy text
    in blocks and decoding it token by token (twice: the two tokens' logits may move towards each other); 0 where
    arithmetic is exact enough for equal texts. `tolerated`: margin <= tolerance in reduced precision.
    """

    prompt: int
    position: int
    margin: float
    tolerance: float
    tolerated: bool


@dataclass(frozen=True)
class Evaluation:
    """Acceptance of a drafter over some prompts.

    `tau`: mean over all cycles of accepted + 1 (bonus included), 1 to the block size. `accepted_by_position[k - 1]`:
    share of cycles in which slot k was accepted; `first_slot_acceptance` is slot 1's. `tokens`: new tokens of all
    texts. `lossless`: every text is the target's own, but for tolerated mismatches.
    """

    tau: float
    accepted_by_position: tuple[float, ...]
    first_slot_acceptance: float
    cycles: int
    tokens: int
    lossless: bool
    mismatches: list[Mismatch]


def evaluate(target: TargetModel, drafter: DFlashDrafter, prompts: Sequence[Sequence[int]], max_new: int) -> Evaluation:
    """Decode every prompt with and without the drafter, at most `max_new` tokens each, and compare.

    In float32 (TF32 off) and float64 the texts must be equal. In bfloat16, or with TF32, even block verification alone
    differs from one-token decoding, so there the first divergence must be a near tie (`Mismatch`). Raises InputError
    where there is nothing to measure: no prompt, an empty one, or every answer ends at its first token.
    """
    if not prompts or not all(prompts):
        raise InputError(
            f"{len(prompts)} prompts, some of them empty", "evaluation", "give prompts of at least a token"
        )
    cycles: list[Cycle] = []
    mismatches: list[Mismatch] = []
    tokens = 0
    for index, prompt in enumerate(prompts):
        input_ids = torch.tensor([list(prompt)], dtype=torch.long, device=target.head_weight.device)
        result = speculative_decode(target, drafter, input_ids, max_new=max_new, eos_ids=target.eos_ids)
        steps = list(greedy_steps(target, input_ids, max_new, target.eos_ids))
        cycles.extend(result.cycles)
        tokens += len(result.tokens)
        position = _first_difference([token for token, _ in steps], result.tokens)
        if position is not None:
            mismatches.append(
                _judge(
                    target,
                    input_ids,
                    steps,
                    prompt=index,
                    position=position,
                    other=result.tokens[position],
                    block_size=drafter.config.block_size,
                )
            )
    if not cycles:
        raise InputError(
            f"all {len(prompts)} answers end at their first token", "evaluation", "allow more tokens, or other prompts"
        )
    by_position = acceptance_by_position(cycles, drafter.config.block_size)
    return Evaluation(
        tau=mean_tau(cycles),
        accepted_by_position=by_position,
        first_slot_acceptance=by_position[0],
        cycles=len(cycles),
        tokens=tokens,
        lossless=all(mismatch.tolerated for mismatch in mismatches),
        mismatches=mismatches,
    )


def _first_difference(greedy: list[int], speculative: list[int]) -> int | None:
    """Index of the first token that differs. Both texts stop by the same rule, so unequal ones have one."""
    return next((i for i, (own, other) in enumerate(zip(greedy, speculative, strict=False)) if own != other), None)


def _judge(
    target: TargetModel,
    input_ids: Tensor,
    steps: list[tuple[int, Tensor]],
    *,
    prompt: int,
    position: int,
    other: int,
    block_size: int,
) -> Mismatch:
    """Whether speculative token `other` at `position` is a near tie of the target's own in `steps`."""
    own, logits = steps[position]
    margin = float(logits[own].float() - logits[other].float())
    if _exact(target.head_weight):
        return Mismatch(prompt, position, margin, tolerance=0.0, tolerated=False)
    tolerance = 2 * _block_difference(target, input_ids, steps, block_size)
    return Mismatch(prompt, position, margin, tolerance, tolerated=margin <= tolerance)


def _exact(weight: Tensor) -> bool:
    """Whether products with `weight` round so little that two ways of decoding must give the same text."""
    backend = torch.backends.cuda if weight.is_cuda else torch.backends.mkldnn
    full = backend.matmul.fp32_precision not in ("tf32", "bf16")
    return weight.dtype == torch.float64 or (weight.dtype == torch.float32 and full)


@torch.no_grad()
def _block_difference(
    target: TargetModel, input_ids: Tensor, steps: list[tuple[int, Tensor]], block_size: int
) -> float:
    """Largest difference of a logit between verifying the target's greedy text in blocks and decoding it singly.

    The greedy text is fed, not the speculative one: the measure is the target's alone, so that an error in
    speculative decoding cannot widen its own tolerance.
    """
    cache = target.new_cache()
    target.forward_with_features(input_ids, cache)
    worst = 0.0
    for start in range(0, len(steps) - 1, block_size):
        block = [token for token, _ in steps[start : start + block_size]]
        verified = target.forward_with_features(input_ids.new_tensor([block]), cache)[1][0]
        # the logits behind token i choose token i + 1
        single = torch.stack([logits for _, logits in steps[start + 1 : start + 1 + block_size]])
        worst = max(worst, float((verified[: len(single)].float() - single.float()).abs().max()))
    return worst
