"""Conversations as token ids, by the target's own chat template, and which of the tokens the assistant wrote.

Templates rarely mark what is generated (`{% generation %}`), so it is found by rendering: the tokens of a conversation
up to an assistant's turn, with the generation prompt, must be the first tokens of the whole conversation. Where they
are not (a template that leaves out earlier reasoning, say), the conversation cannot be trained on as one sequence.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jinja2

from trainer.bad_rows import EMPTY_ANSWER, HISTORY, TEMPLATE, BadRow
from trainer.errors import InputError, nearest

Message = dict[str, str]
Conversation = tuple[Message, ...]
Variables = Mapping[str, bool | int | float | str]
"""What a chat template is rendered with besides the messages, by name: `enable_thinking`, say."""


def conversation_of(value: Iterable[Any]) -> Conversation:
    """Messages with `role` and `content`: a system message or none, then user and assistant in turn.

    Raises `ValueError` that says what is wrong with which message.
    """
    found: list[Message] = []
    for number, each in enumerate(value):
        fields: dict[str, Any] = each if isinstance(each, dict) else {}
        role, content = fields.get("role"), fields.get("content")
        before = found[-1]["role"] if found else None
        wanted = ("system", "user") if before is None else (("user",) if before != "user" else ("assistant",))
        if not isinstance(role, str) or role not in wanted:
            raise ValueError(f"message {number} has role {role!r} where {' or '.join(wanted)} is due")
        if not isinstance(content, str) or not content.strip():
            raise ValueError(f"message {number} has no text as its content")
        found.append({"role": role, "content": content})
    if len(found) < 1 + (found[0]["role"] == "system" if found else 0):
        raise ValueError("no message of a user")
    return tuple(found)


def asked(conversation: Conversation) -> list[Conversation]:
    """What stands before each of the assistant's turns, since the one before: the assistant's own words left out."""
    turns: list[Conversation] = []
    since: list[Message] = []
    for message in conversation:
        if message["role"] != "assistant":
            since.append(message)
        if message["role"] == "user":
            turns.append(tuple(since))
            since = []
    return turns


def refuse_unread(variables: Variables | None, tokenizer: Any) -> None:
    """Raise `InputError` for a variable whose name the target's template does not have: it would change nothing."""
    template = str(tokenizer.chat_template or "")
    known = set(re.findall(r"[A-Za-z_][A-Za-z0-9_]*", template))
    for name in variables or ():
        if name not in known:
            guess = nearest(name, known)
            raise InputError(
                f"the target's chat template does not read {name!r}" if template else "the target has no chat template",
                "training.chat_template_kwargs",
                f"did you mean {guess!r}?" if guess else "leave it out",
            )


def prompt_ids(messages: Sequence[Message], tokenizer: Any, variables: Variables | None = None) -> list[int]:
    """Token ids of a conversation for which an answer is due. Raises `BadRow`.

    A target without a chat template gets the bare text of a single message.
    """
    if not tokenizer.chat_template:
        if len(messages) > 1:
            raise BadRow(TEMPLATE, "the target has no chat template, and there are several messages")
        return [int(each) for each in tokenizer(messages[0]["content"])["input_ids"]]
    return _ids(_rendered(messages, tokenizer, variables, answer_due=True), tokenizer)


def supervised(
    conversation: Conversation, tokenizer: Any, ends: frozenset[int], variables: Variables | None = None
) -> tuple[list[int], list[int]]:
    """Token ids [S] of a conversation with its answers as they are, and its loss mask [S]. Raises `BadRow`.

    The mask is 1 where the assistant writes: from behind the generation prompt to the end of its turn, and the end
    token too where the template has one of `ends` there.
    """
    whole = _rendered(conversation, tokenizer, variables, answer_due=False)
    ids = _ids(whole, tokenizer)
    mask = [0] * len(ids)
    texts = [tokenizer.decode([each]) for each in sorted(ends)]
    for turn, message in enumerate(conversation):
        if message["role"] != "assistant":
            continue
        before = _rendered(conversation[:turn], tokenizer, variables, answer_due=True)
        if not whole.startswith(before):
            raise BadRow(HISTORY)
        through = before + _written(whole[len(before) :], message["content"].strip(), texts)
        start, end = _ids(before, tokenizer), _ids(through, tokenizer)
        # a token across the border would be the target's in one place and the prompt's in the other
        if ids[: len(start)] != start or ids[: len(end)] != end:
            raise BadRow(HISTORY)
        mask[len(start) : len(end)] = [1] * (len(end) - len(start))
    if not any(mask):
        raise BadRow(EMPTY_ANSWER)
    return ids, mask


def _written(rest: str, content: str, ends: Sequence[str]) -> str:
    """The assistant's part of what follows its generation prompt; a template may put something before the content."""
    if any(end in content for end in ends):
        raise BadRow(HISTORY)
    found = [(rest.index(end), end) for end in ends if end in rest]
    position, end = min(found, default=(0, ""))
    if rest[:position].rstrip().endswith(content):
        return rest[:position] + end
    # a template that ends no turn
    lead = len(rest) - len(rest.lstrip())
    if not rest.startswith(content, lead):
        raise BadRow(HISTORY)
    return rest[: lead + len(content)]


def _rendered(messages: Sequence[Message], tokenizer: Any, variables: Variables | None, *, answer_due: bool) -> str:
    if not tokenizer.chat_template:
        raise BadRow(TEMPLATE, "the target has no chat template")
    try:
        text: str = tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=answer_due, **(variables or {})
        )
    except (jinja2.TemplateError, TypeError, ValueError) as error:
        raise BadRow(TEMPLATE, str(error)) from error
    return text


def _ids(text: str, tokenizer: Any) -> list[int]:
    # the template writes the special tokens itself
    return [int(each) for each in tokenizer(text, add_special_tokens=False)["input_ids"]]
