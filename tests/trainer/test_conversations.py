"""Rows of conversations: every turn is the target's own answer, or the one that stands there; bad rows are named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import transformers

from trainer.errors import InputError
from trainer.facts import open_data, target_facts
from trainer.parts import load_parts
from trainer.prepare import prepare, prepare_key
from trainer.prepared import read_held_out
from trainer.settings import settings_from_json

pytestmark = pytest.mark.torch

Json = dict[str, Any]
END = "w7"
# the assistant's turn ends with a word, which is the end token: a target this small never says a special one
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|> {{ message['content'] }} "
    "{% if message['role'] == 'assistant' %}" + END + " {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def user(*words: int) -> Json:
    return {"role": "user", "content": " ".join(f"w{word}" for word in words)}


def said(*words: int) -> Json:
    return {**user(*words), "role": "assistant"}


@pytest.fixture(scope="module")
def ending_target(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny target with a chat template, an end token that it says, and greedy answers."""
    folder = tmp_path_factory.mktemp("ending") / "target"
    shutil.copytree(tiny_target, folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    model.generation_config.eos_token_id = [3, tokenizer.convert_tokens_to_ids(END)]
    with torch.no_grad():
        # likelier than the other words, so that some answers end and some do not
        model.lm_head.weight[tokenizer.convert_tokens_to_ids(END)] *= 1.6
    model.save_pretrained(folder)
    return folder


def written(path: Path, lines: list[Any]) -> str:
    path.write_text("".join((each if isinstance(each, str) else json.dumps(each)) + "\n" for each in lines))
    return str(path)


def made(settings: Json, out: Path) -> tuple[list[Json], Json]:
    out.mkdir()
    prepare(settings_from_json(settings), out)
    return list(datasets.load_from_disk(str(out / "dataset"))), json.loads((out / "prepare.json").read_text())


def test_every_turn_is_the_target_s_own_answer_to_what_it_said(
    ending_target: Path, make_settings: Any, tmp_path: Path
) -> None:
    talks = [
        [user(1, 2), said(30, 30), user(3), said(31), user(4, 5, 6)],
        [user(8), said(39), user(9, 10), said(39)],
        [user(11, 12, 13)],
        [user(20, 21), said(39), user(22)],
        [user(23), said(39), user(24), said(39), user(25), said(39), user(26)],
    ]
    prompts = written(tmp_path / "p.jsonl", [{"messages": each} for each in talks])
    raw = make_settings(
        target=str(ending_target), prompts=prompts, prompt_field="messages", prompt_count=5, evaluation_prompts=1,
        answer_tokens=6, answer_batch=2, buckets=[96],
    )  # fmt: skip
    rows, facts = made(raw, tmp_path / "out")
    model = transformers.AutoModelForCausalLM.from_pretrained(ending_target, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(ending_target)
    ends = {3, tokenizer.convert_tokens_to_ids(END)}
    finished = 0
    for row, talk in zip([*rows, *held_out_rows(tmp_path / "out")], talks, strict=True):
        ids, mask = row["input_ids"], row["loss_mask"]
        history: list[Json] = []
        at = 0
        for message in [each for each in talk if each["role"] == "user"]:
            history.append(message)
            text = tokenizer.apply_chat_template(history, tokenize=False, add_generation_prompt=True)
            prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
            assert ids[: len(prompt)] == prompt and not any(mask[at : len(prompt)])
            answer: list[int] = []
            while len(answer) < 6 and not (answer and answer[-1] in ends):
                with torch.no_grad():
                    answer.append(int(model(torch.tensor([prompt + answer])).logits[0, -1].argmax()))
            at = len(prompt) + len(answer)
            assert ids[len(prompt) : at] == answer and all(mask[len(prompt) : at])
            ended = answer[-1] in ends
            finished += ended
            history.append({"role": "assistant", "content": tokenizer.decode(answer[:-1] if ended else answer)})
        assert at == len(ids)
    # both kinds of ending were met
    turns = sum(each["role"] == "user" for talk in talks for each in talk)
    assert 0 < finished < turns
    assert (facts["rows"], facts["evaluation_prompts"], facts["bad"]) == (4, 1, {})


def held_out_rows(out: Path) -> list[Json]:
    """Held-out sequences; their earlier answers are in the prompt, so only the last one can be told apart."""
    found = []
    for each in read_held_out(out):
        ids = [*each.prompt, *each.answer]
        found.append({"input_ids": ids, "loss_mask": _Last(len(each.prompt), len(ids))})
    return found


class _Last(list[int]):
    """A mask that says of earlier turns whatever is asked, and of the last answer where it is."""

    def __init__(self, start: int, end: int) -> None:
        super().__init__([0] * start + [1] * (end - start))
        self._start = start

    def __getitem__(self, span: Any) -> Any:
        return super().__getitem__(span) if span.stop > self._start else []


BAD_LINES = [
    {"prompt": "w1 w2"},
    "{",
    {"prompt": ""},
    {"prompt": " ".join(["w3"] * 40)},
    {"prompt": "w1 <reserved_0>"},
    {"prompt": [user(1), user(2)]},
    {"prompt": "w5 w6"},
    {"prompt": " ".join(["w3"] * 40)},
]


def test_bad_lines_are_counted_and_named(make_settings: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    raw = make_settings(
        prompts=written(tmp_path / "p.jsonl", BAD_LINES), prompt_count=8, evaluation_prompts=1, bad_prompts=5
    )
    caplog.set_level("WARNING")
    rows, facts = made(raw, tmp_path / "out")
    assert len(rows) == facts["rows"] == 2
    assert facts["bad"] == {
        "malformed": {"count": 3, "lines": [2, 3, 6]},
        "mask_token": {"count": 1, "lines": [5]},
        "too_long": {"count": 1, "lines": [4]},
    }
    # what is held out may be longer than a bucket
    assert [len(each.answer) for each in read_held_out(tmp_path / "out")] == [16]
    assert "malformed" in caplog.text and "lines 2, 3, 6" in caplog.text


def test_more_bad_lines_than_allowed_are_refused_before_anything_is_answered(
    make_settings: Any, tmp_path: Path
) -> None:
    given = {"prompts": written(tmp_path / "p.jsonl", BAD_LINES), "prompt_count": 8, "evaluation_prompts": 1}
    out = tmp_path / "out"
    out.mkdir()
    with pytest.raises(InputError, match=r"not JSON.*and 2 more lines are bad.*p.jsonl:2"):
        prepare(settings_from_json(make_settings(**given)), out)
    with pytest.raises(InputError, match=r"5 lines cannot be used.*too_long.*lines 4; give 5|give 5") as caught:
        prepare(settings_from_json(make_settings(**given, bad_prompts=4)), out)
    assert caught.value.where == "training.bad_prompts"
    assert len((out / "answers.ndjson").read_text().splitlines()) == 1
    # the number is no part of what the data is: it goes on from there
    prepare(settings_from_json(make_settings(**given, bad_prompts=5)), out)
    assert (out / "prepare.json").exists()


def test_an_answer_that_is_empty_is_named(ending_target: Path, make_settings: Any, tmp_path: Path) -> None:
    prompts = written(tmp_path / "p.jsonl", [{"prompt": f"w{number}"} for number in range(12)])
    given = {"target": str(ending_target), "prompts": prompts, "prompt_count": 12, "evaluation_prompts": 0}
    journal = tmp_path / "whole" / "answers.ndjson"
    journal.parent.mkdir()
    key = prepare_key(settings_from_json(make_settings(**given)))
    end = transformers.AutoTokenizer.from_pretrained(ending_target).convert_tokens_to_ids(END)
    # as a target that ends its answer at once would have it in the journal
    lines = [{"key": key}, {"turn": 0, "rows": list(range(1, 13)), "answers": [[end]] * 2 + [[9, 10, end]] * 10}]
    journal.write_text("".join(json.dumps(each) + "\n" for each in lines))
    with pytest.raises(InputError, match=r"empty_answer .*: lines 1, 2"):
        prepare(settings_from_json(make_settings(**given)), journal.parent)
    prepare(settings_from_json(make_settings(**given, bad_prompts=2)), journal.parent)
    facts = json.loads((journal.parent / "prepare.json").read_text())
    assert (facts["rows"], facts["ended"]) == (10, 10)


def test_a_conversation_ends_where_the_largest_bucket_does(make_settings: Any, tmp_path: Path) -> None:
    talks = [[user(1), said(2), user(*range(30)), said(3), user(4)], [user(1), said(2), user(3)]]
    raw = make_settings(
        prompts=written(tmp_path / "p.jsonl", [{"prompt": each} for each in talks]), prompt_count=2,
        evaluation_prompts=0, answer_tokens=4,
    )  # fmt: skip
    rows, facts = made(raw, tmp_path / "out")
    assert [sum(each["loss_mask"]) for each in rows] == [4, 8]
    assert (facts["shortened"], facts["bad"]) == ([1], {})


def test_a_dataset_of_messages_is_trained_on_as_it_stands(
    ending_target: Path, make_settings: Any, tmp_path: Path
) -> None:
    talks = [
        [user(1, 2), said(30, 31, 32), user(3), said(33, 34)],
        [user(4), user(5)],
        [user(6), said(35, 36)],
        [user(9), said(37, 38, 39), user(10), said(38, 37)],
    ]
    datasets.Dataset.from_dict({"messages": talks}).save_to_disk(str(tmp_path / "data"))
    given = {"target": str(ending_target), "data": str(tmp_path / "data"), "prompts": None, "evaluation_prompts": 1}
    out = tmp_path / "out"
    out.mkdir()
    with pytest.raises(InputError, match=r"1 rows cannot be used: malformed .*rows 1"):
        prepare(settings_from_json(make_settings(**given)), out)
    raw = make_settings(**given, bad_prompts=1)
    prepare(settings_from_json(raw), out)
    rows = list(datasets.load_from_disk(str(out / "dataset")))
    tokenizer = transformers.AutoTokenizer.from_pretrained(ending_target)
    spoken = [
        tokenizer.decode([token for token, each in zip(row["input_ids"], row["loss_mask"], strict=True) if each])
        for row in rows
    ]
    assert spoken == [f"w30 w31 w32 {END} w33 w34 {END}", f"w35 w36 {END}"]
    # the run takes rows and held-out answers from there
    settings = settings_from_json({**raw, "prepared": str(out)})
    facts = target_facts(settings)
    assert open_data(settings, facts.tokenizer, facts.config.vocab_size).rows == (0, 1)
    (item,) = load_parts(settings).held_out
    assert tokenizer.decode(item.answer) == f"w38 w37 {END}"
    assert tokenizer.decode(item.prompt).endswith(f"w37 w38 w39 {END} <|user|> w10 <|assistant|>")
    # other messages are other data
    key = prepare_key(settings)
    datasets.Dataset.from_dict({"messages": talks[2:]}).save_to_disk(str(tmp_path / "data"))
    assert prepare_key(settings) != key
