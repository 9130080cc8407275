"""Greedy decoding of a target, alone and with a drafter's blocks (speculative decoding).

One cycle, after arXiv:2602.06036 and the authors' reference code: the drafter proposes B - 1 tokens behind the
anchor, the target verifies the block in one causal pass, the longest prefix that equals the target's own greedy
choice is accepted, and the target's token at the first difference (the bonus) is the next anchor. The text is
the target's own; the drafter only decides how many passes it takes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from trainer.dflash_model import DFlashDrafter, DrafterCache


class TargetModel(Protocol):
    """What decoding needs of a target. Its K layers are the drafter's `target_layer_ids`."""

    @property
    def head_weight(self) -> Tensor:
        """The head [V, D]."""
        ...

    @property
    def eos_ids(self) -> Collection[int]:
        """Tokens that end a text."""
        ...

    def new_cache(self) -> Any:
        """An empty key-value cache for one text."""
        ...

    def forward_with_features(self, input_ids: Tensor, cache: Any) -> tuple[Tensor, Tensor]:
        """Append `input_ids` long [1, T] to the cached text: states [1, T, K * D] and logits [1, T, V]."""
        ...

    def crop(self, cache: Any, length: int) -> None:
        """Forget all but the first `length` positions."""
        ...

    def embed(self, ids: Tensor) -> Tensor:
        """Embeddings [..., D] of `ids`."""
        ...


@dataclass(frozen=True)
class Cycle:
    """One draft and its verification.

    `proposals`: the B - 1 drafted tokens. `accepted`: how many of them the target agreed with, in a row.
    `tokens`: what the cycle adds to the text: the accepted ones and the bonus (cut after an end-of-text token).
    """

    proposals: tuple[int, ...]
    accepted: int
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class SpeculativeResult:
    """A text decoded speculatively. `tokens`: the new tokens; the first one comes from the prompt's own pass."""

    tokens: list[int]
    cycles: list[Cycle]

    @property
    def accepted(self) -> list[int]:
        """Accepted proposals of each cycle, 0 to B - 1."""
        return [cycle.accepted for cycle in self.cycles]

    @property
    def proposals(self) -> list[tuple[int, ...]]:
        """Drafted tokens of each cycle."""
        return [cycle.proposals for cycle in self.cycles]

    @property
    def tau(self) -> float:
        """Mean over cycles of accepted + 1 (the bonus counts): 1 to B. ValueError where there was no cycle."""
        return mean_tau(self.cycles)


def mean_tau(cycles: Collection[Cycle]) -> float:
    """tau, bonus included: mean over cycles of accepted + 1. ValueError without a cycle."""
    if not cycles:
        raise ValueError("no cycle was run: the text ended at its first token")
    return sum(cycle.accepted + 1 for cycle in cycles) / len(cycles)


def acceptance_by_position(cycles: Collection[Cycle], block_size: int) -> tuple[float, ...]:
    """Share of cycles in which slot k was accepted (so all slots before it too), k = 1 .. block_size - 1."""
    if not cycles:
        raise ValueError("no cycle was run: the text ended at its first token")
    return tuple(sum(cycle.accepted >= k for cycle in cycles) / len(cycles) for k in range(1, block_size))


def greedy_steps(
    model: TargetModel, input_ids: Tensor, max_new: int, eos_ids: Collection[int]
) -> Iterator[tuple[int, Tensor]]:
    """The target alone, one token a pass: yields each new token with the logits [V] that chose it."""
    cache = model.new_cache()
    new = input_ids
    for _ in range(max_new):
        with torch.no_grad():
            logits = model.forward_with_features(new, cache)[1][0, -1]
        token = int(logits.argmax())
        yield token, logits
        if token in eos_ids:
            return
        new = input_ids.new_tensor([[token]])


def greedy_decode(model: TargetModel, input_ids: Tensor, max_new: int, eos_ids: Collection[int]) -> list[int]:
    """The target's own greedy continuation of `input_ids` long [1, T]: at most `max_new` tokens.

    It ends with the first of `eos_ids`, which is part of it.
    """
    return [token for token, _ in greedy_steps(model, input_ids, max_new, eos_ids)]


@torch.no_grad()
def speculative_decode(
    target: TargetModel,
    drafter: DFlashDrafter,
    input_ids: Tensor,
    *,
    max_new: int,
    eos_ids: Collection[int],
    block_size: int | None = None,
) -> SpeculativeResult:
    """Continue `input_ids` long [1, T] with at most `max_new` tokens, drafted in blocks of `block_size`.

    `block_size` None is the trained one; a smaller one works too. Target and drafter may differ in device and
    dtype. An end-of-text token cuts the last cycle's tokens and its count of accepted ones; `max_new` cuts the
    text only, since that cycle's verification was a whole one.
    """
    size = drafter.config.block_size if block_size is None else block_size
    if size < 2 or max_new < 1 or input_ids.shape[1] < 1:
        raise ValueError(
            f"block_size {size}, max_new {max_new}, a prompt of {input_ids.shape[1]} tokens: "
            "at least 2, 1 and 1 are needed"
        )
    masks = [drafter.config.mask_token_id] * (size - 1)
    target_cache, drafter_cache = target.new_cache(), DrafterCache()
    features, logits = target.forward_with_features(input_ids, target_cache)
    tokens = [int(logits[0, -1].argmax())]
    start = input_ids.shape[1]
    cycles: list[Cycle] = []
    while len(tokens) < max_new and tokens[-1] not in eos_ids:
        anchor = tokens[-1]
        embeddings = target.embed(input_ids.new_tensor([[anchor, *masks]]))
        proposals = _propose(drafter, embeddings, features, start, drafter_cache, target.head_weight)
        features, logits = target.forward_with_features(input_ids.new_tensor([[anchor, *proposals]]), target_cache)
        cycle = _judge(proposals, logits[0].argmax(dim=-1).tolist(), eos_ids)
        cycles.append(cycle)
        tokens.extend(cycle.tokens)
        # the anchor and what was accepted are committed; the rest of the block never happened
        committed = cycle.accepted + 1
        start += committed
        features = features[:, :committed]
        target.crop(target_cache, start)
    return SpeculativeResult(tokens[:max_new], cycles)


def _propose(  # noqa: PLR0917 -- one call site
    drafter: DFlashDrafter, embeddings: Tensor, features: Tensor, start: int, cache: DrafterCache, head: Tensor
) -> list[int]:
    """The drafter's most likely token for every slot behind the anchor."""
    weight = drafter.fc.weight
    hidden = drafter.draft(embeddings.to(weight), features.to(weight), start, cache)
    return (hidden[0, 1:].to(head) @ head.t()).argmax(dim=-1).tolist()


def _judge(proposals: list[int], posterior: list[int], eos_ids: Collection[int]) -> Cycle:
    """Accept the longest prefix of `proposals` that equals the target's greedy tokens `posterior`."""
    accepted = 0
    while accepted < len(proposals) and proposals[accepted] == posterior[accepted]:
        accepted += 1
    tokens = posterior[: accepted + 1]
    ends = [index for index, token in enumerate(tokens) if token in eos_ids]
    if ends:
        tokens = tokens[: ends[0] + 1]
        accepted = min(accepted, len(tokens))
    return Cycle(tuple(proposals), accepted, tuple(tokens))
