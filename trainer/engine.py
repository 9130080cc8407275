"""Who answers the prompts: what `prepare` asks of an engine, and the target itself, run here by transformers."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Protocol

import torch

from trainer.target import Target

Prompts = Mapping[int, Sequence[int]]
"""Token ids of prompts, by row."""
Answers = dict[int, list[int]]
"""Token ids of answers, by row; the end token is the last one where the target ended the answer itself."""

UNTOLD = -1
"""Stands for an answer whose tokens the engine cannot tell."""


class Engine(Protocol):
    """Greedy answers of the target. What an answer is must not depend on what was answered before."""

    def answers(self, prompts: Prompts, known: Container[int]) -> Iterator[Answers]:
        """The answers of all rows but the `known` ones, in pieces as they come; each piece is kept whole."""
        ...


class TransformersEngine:
    """The target in this process. Answers are at most `tokens` long.

    Prompts of like length are answered together, `batch` of them padded on the left. A batch is a matter of all the
    prompts, also of the known ones: under bfloat16 an answer can depend on what it was computed with.
    """

    def __init__(self, target: Target, tokens: int, batch: int) -> None:
        self._target = target
        self._tokens = tokens
        self._batch = batch

    def answers(self, prompts: Prompts, known: Container[int]) -> Iterator[Answers]:
        """See `Engine`."""
        order = sorted(prompts, key=lambda row: (len(prompts[row]), row))
        for start in range(0, len(order), self._batch):
            rows = order[start : start + self._batch]
            if not all(row in known for row in rows):
                yield dict(zip(rows, self._generate([prompts[row] for row in rows]), strict=True))

    @torch.no_grad()
    def _generate(self, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        target = self._target
        pad = target.tokenizer.pad_token_id
        filler = pad if pad is not None else min(target.eos_ids, default=0)
        width = max(len(each) for each in prompts)
        ids = torch.full((len(prompts), width), filler, dtype=torch.long)
        seen = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.tensor(prompt, dtype=torch.long)
            seen[row, width - len(prompt) :] = 1
        made = target.model.generate(
            input_ids=ids.to(target.device),
            attention_mask=seen.to(target.device),
            max_new_tokens=self._tokens,
            do_sample=False,
            pad_token_id=filler,
            eos_token_id=sorted(target.eos_ids) or None,
        )
        return [until_end(each, target.eos_ids) for each in made[:, width:].tolist()]


def until_end(ids: list[int], ends: frozenset[int]) -> list[int]:
    """An answer up to and with its first end token."""
    for index, token in enumerate(ids):
        if token in ends:
            return ids[: index + 1]
    return ids
