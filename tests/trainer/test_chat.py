"""Conversations as token ids and loss masks, under the chat templates that targets have."""

from __future__ import annotations

from typing import Any

import pytest

from tests.trainer.chat_templates import ALTERNATING, BARE, CHATML_SYSTEM, HEADERS, SWITCHED, THINKING, byte_tokenizer
from trainer.bad_rows import HISTORY, TEMPLATE, BadRow
from trainer.chat import asked, conversation_of, prompt_ids, refuse_unread, supervised
from trainer.errors import InputError

pytestmark = pytest.mark.torch

TALK = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "one?"},
    {"role": "assistant", "content": "ok, one"},
    {"role": "user", "content": "two?"},
    {"role": "assistant", "content": "ok\n\ntwo"},
]
KINDS = {"smollm2": (CHATML_SYSTEM, "<|im_end|>"), "llama3": (HEADERS, "<|eot_id|>"), "bare": (BARE, "")}


def pieces(tokenizer: Any, ids: list[int], mask: list[int]) -> list[str]:
    """The supervised spans as text."""
    spans: list[list[int]] = []
    for index, each in enumerate(mask):
        if each and (index == 0 or not mask[index - 1]):
            spans.append([])
        if each:
            spans[-1].append(ids[index])
    return [tokenizer.decode(span) for span in spans]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("first", [0, 1])
def test_the_mask_is_what_the_assistant_writes(kind: str, first: int) -> None:
    template, end = KINDS[kind]
    tokenizer = byte_tokenizer(template, end=end or "<|im_end|>")
    talk = conversation_of(TALK[first:])
    ids, mask = supervised(talk, tokenizer, frozenset({tokenizer.eos_token_id}))
    assert pieces(tokenizer, ids, mask) == [f"ok, one{end}", f"ok\n\ntwo{end}"]
    whole = tokenizer.apply_chat_template(list(talk), tokenize=False)
    assert ids == tokenizer(whole, add_special_tokens=False)["input_ids"]
    # the last answer begins where the target would have begun it
    last = prompt_ids(talk[:-1], tokenizer)
    assert ids[: len(last)] == last and not any(mask[len(last) - 1 : len(last)]) and mask[len(last)]


def test_a_template_that_trims_is_followed() -> None:
    tokenizer = byte_tokenizer(HEADERS, end="<|eot_id|>")
    talk = conversation_of([{"role": "user", "content": "one?"}, {"role": "assistant", "content": "  ok \n"}])
    ids, mask = supervised(talk, tokenizer, frozenset({tokenizer.eos_token_id}))
    assert pieces(tokenizer, ids, mask) == ["ok<|eot_id|>"]


def test_reasoning_is_supervised_where_the_template_keeps_it_and_named_where_it_does_not() -> None:
    tokenizer = byte_tokenizer(THINKING)
    ends = frozenset({tokenizer.eos_token_id})
    thought = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nok"}
    ids, mask = supervised(conversation_of([TALK[1], thought]), tokenizer, ends)
    assert pieces(tokenizer, ids, mask) == ["<think>\nhm\n</think>\n\nok<|im_end|>"]
    # without reasoning the template writes an empty one, which the target would have to write as well
    ids, mask = supervised(conversation_of(TALK[1:]), tokenizer, ends)
    assert pieces(tokenizer, ids, mask) == ["ok, one<|im_end|>", "<think>\n\n</think>\n\nok\n\ntwo<|im_end|>"]
    with pytest.raises(BadRow) as caught:
        supervised(conversation_of([TALK[1], thought, TALK[3], TALK[4]]), tokenizer, ends)
    assert caught.value.reason == HISTORY


def test_the_template_s_variables_reach_every_rendering() -> None:
    tokenizer = byte_tokenizer(SWITCHED)
    ends, off = frozenset({tokenizer.eos_token_id}), {"enable_thinking": False}
    talk = conversation_of(TALK[1:3])
    asks = [
        tokenizer.decode(prompt_ids(talk[:1], tokenizer, given)) for given in (None, {"enable_thinking": True}, off)
    ]
    assert asks[0] == asks[1] and asks[2] == asks[0] + "<think>\n\n</think>\n\n"
    # then the empty thought is the prompt's, else the target's
    assert pieces(tokenizer, *supervised(talk, tokenizer, ends)) == ["<think>\n\n</think>\n\nok, one<|im_end|>"]
    assert pieces(tokenizer, *supervised(talk, tokenizer, ends, off)) == ["ok, one<|im_end|>"]


def test_a_variable_that_the_template_does_not_read_is_refused() -> None:
    refuse_unread({"enable_thinking": False}, byte_tokenizer(SWITCHED))
    refuse_unread(None, byte_tokenizer(None))
    with pytest.raises(InputError, match=r"does not read 'enable_thinkng'.*did you mean 'enable_thinking'"):
        refuse_unread({"enable_thinkng": False}, byte_tokenizer(SWITCHED))
    with pytest.raises(InputError, match="has no chat template"):
        refuse_unread({"enable_thinking": False}, byte_tokenizer(None))


def test_a_token_across_the_border_is_no_border() -> None:
    # the generation prompt ends with a line break, the content begins with one: the two are one token
    tokenizer = byte_tokenizer(CHATML_SYSTEM)
    talk = ({"role": "user", "content": "one?"}, {"role": "assistant", "content": "\nok"})
    with pytest.raises(BadRow) as caught:
        supervised(talk, tokenizer, frozenset({tokenizer.eos_token_id}))
    assert caught.value.reason == HISTORY


def test_a_content_with_an_end_token_in_it_is_not_taken() -> None:
    tokenizer = byte_tokenizer(CHATML_SYSTEM)
    talk = conversation_of([TALK[1], {"role": "assistant", "content": "ok<|im_end|>ok"}])
    with pytest.raises(BadRow):
        supervised(talk, tokenizer, frozenset({tokenizer.eos_token_id}))


def test_what_the_template_refuses_is_named() -> None:
    tokenizer = byte_tokenizer(ALTERNATING)
    with pytest.raises(BadRow, match="no system role") as caught:
        prompt_ids(conversation_of(TALK)[:2], tokenizer)
    assert caught.value.reason == TEMPLATE
    with pytest.raises(BadRow, match="no chat template"):
        prompt_ids(conversation_of(TALK)[:2], byte_tokenizer(None))


def test_what_is_asked_leaves_the_assistant_s_words_out() -> None:
    assert asked(conversation_of(TALK)) == [tuple(TALK[:2]), (TALK[3],)]
    assert asked(conversation_of(TALK[:4])) == [tuple(TALK[:2]), (TALK[3],)]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ([], "no message of a user"),
        (TALK[:1], "no message of a user"),
        (TALK[2:], "message 0 has role 'assistant' where system or user is due"),
        ([TALK[1], TALK[3]], "message 1 has role 'user' where assistant is due"),
        ([TALK[1], TALK[2], TALK[0]], "message 2 has role 'system' where user is due"),
        ([{"role": "user", "content": None}], "message 0 has no text"),
        ([{"role": "user", "content": " "}], "message 0 has no text"),
        ([{"from": "human", "value": "one?"}], "message 0 has role None"),
        (["one?"], "message 0 has role None"),
    ],
)
def test_messages_that_are_none_are_named(value: list[Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        conversation_of(value)
