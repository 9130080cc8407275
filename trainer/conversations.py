"""Rows to train on from conversations: answered turn by turn by the target, or with the answers that they have."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from trainer.bad_rows import EMPTY_ANSWER, HISTORY, MASK_TOKEN, NOT_EXACT, TOO_LONG, BadRow, BadRows
from trainer.chat import Conversation, Message, Variables, asked, prompt_ids, supervised
from trainer.engine import UNTOLD, Prompts
from trainer.progress import Progress

log = logging.getLogger(__name__)

AnswerAll = Callable[[Prompts, int], Mapping[int, Sequence[int]]]
"""Answers to prompts, both by row, of one turn (counted from 0)."""


@dataclass
class Row:
    """A sequence: token ids [S], loss mask [S], and where its last answer begins. `history` is what it says."""

    input_ids: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    last_answer: int = 0
    history: list[Message] = field(default_factory=list)


@dataclass(frozen=True)
class Rules:
    """How rows are written, and what makes them unusable. `ends`: tokens that end an answer; `longest`: the largest
    bucket, in tokens, which rows that are `held_out` may exceed; `variables`: of the chat template."""

    tokenizer: Any
    ends: frozenset[int]
    longest: int
    mask_token: int
    held_out: Collection[int]
    variables: Variables | None

    def too_long(self, row: int, prompt: Sequence[int]) -> bool:
        """Whether no anchor (two tokens of an answer in a row) fits behind the prompt."""
        return row not in self.held_out and len(prompt) + 2 > self.longest


def answered(
    conversations: Mapping[int, Conversation],
    answer_all: AnswerAll,
    rules: Rules,
    bad: BadRows,
    beat: Callable[[], None] = lambda: None,
) -> tuple[dict[int, Row], list[int]]:
    """Rows in which every turn of the assistant is the target's own, in order; bad ones are added to `bad`.

    The conversation goes on from what the target said, not from what stood there. Second: the rows that end before
    their last turn, since the largest bucket does. `beat` is called now and then while prompts are rendered. Raises
    `InputError` where too many are bad.
    """
    turns = {row: asked(each) for row, each in conversations.items()}
    rows: dict[int, Row] = {row: Row() for row in sorted(conversations)}
    shortened: list[int] = []
    going_on = set(rows)
    for turn in range(max((len(each) for each in turns.values()), default=0)):
        prompts: dict[int, list[int]] = {}
        progress = Progress("prompts rendered", len(going_on), 0, beat)
        for row in sorted(going_on):
            progress.add(1)
            if turn >= len(turns[row]):
                going_on.discard(row)
                continue
            rows[row].history += turns[row][turn]
            try:
                prompts[row] = _next_prompt(row, rows[row], rules)
            except BadRow as found:
                going_on.discard(row)
                if turn > 0 and found.reason == TOO_LONG:
                    shortened.append(row)
                else:
                    bad.add(row, found.reason)
                    del rows[row]
        # before the target is asked for hours
        bad.refuse_too_many()
        if not prompts:
            break
        if len(going_on) < len(rows) or turn > 0:
            log.info("turn %d of %d conversations", turn + 1, len(prompts))
        answers = answer_all(prompts, turn)
        for row, prompt in prompts.items():
            try:
                _take(rows[row], prompt, list(answers[row]), rules)
            except BadRow as found:
                going_on.discard(row)
                bad.add(row, found.reason)
                del rows[row]
    return rows, sorted(shortened)


def _next_prompt(number: int, row: Row, rules: Rules) -> list[int]:
    prompt = prompt_ids(row.history, rules.tokenizer, rules.variables)
    if prompt[: len(row.input_ids)] != row.input_ids:
        raise BadRow(HISTORY)
    if rules.mask_token in prompt:
        raise BadRow(MASK_TOKEN)
    if rules.too_long(number, prompt):
        raise BadRow(TOO_LONG)
    return prompt


def _take(row: Row, prompt: list[int], answer: list[int], rules: Rules) -> None:
    said = answer[:-1] if answer and answer[-1] in rules.ends else answer
    if UNTOLD in answer:
        raise BadRow(NOT_EXACT)
    if rules.mask_token in answer:
        raise BadRow(MASK_TOKEN)
    if not said:
        raise BadRow(EMPTY_ANSWER)
    row.loss_mask += [0] * (len(prompt) - len(row.loss_mask)) + [1] * len(answer)
    row.input_ids = prompt + answer
    row.last_answer = len(prompt)
    content = rules.tokenizer.decode(said, clean_up_tokenization_spaces=False)
    row.history.append({"role": "assistant", "content": content})


def as_they_are(
    conversations: Mapping[int, Conversation], rules: Rules, bad: BadRows, beat: Callable[[], None] = lambda: None
) -> dict[int, Row]:
    """Rows with the answers that the conversations have; bad ones are added to `bad`. `beat` is called now and then."""
    rows: dict[int, Row] = {}
    progress = Progress("conversations rendered", len(conversations), 0, beat)
    for number, conversation in conversations.items():
        progress.add(1)
        try:
            rows[number] = _row_of(number, conversation, rules)
        except BadRow as found:
            bad.add(number, found.reason)
    return rows


def _row_of(number: int, conversation: Conversation, rules: Rules) -> Row:
    ids, mask = supervised(conversation, rules.tokenizer, rules.ends, rules.variables)
    if rules.mask_token in ids:
        raise BadRow(MASK_TOKEN)
    seen = mask if number in rules.held_out else mask[: rules.longest]
    if (1, 1) not in pairwise(seen):
        raise BadRow(TOO_LONG if len(ids) > rules.longest else EMPTY_ANSWER)
    start = max(index for index, each in enumerate(mask) if each and (index == 0 or not mask[index - 1]))
    return Row(ids, mask, start)
