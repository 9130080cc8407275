"""Prepared data is the target's own greedy text, keyed by what it depends on; check says what it needs."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import transformers

from trainer.chat import prompt_ids
from trainer.check import check
from trainer.engine import TransformersEngine
from trainer.errors import InputError
from trainer.prepare import prepare_key
from trainer.prompts import read_prompts
from trainer.settings import settings_from_json
from trainer.target import Target
from trainer.train_dflash_pipeline import run

pytestmark = pytest.mark.torch


def checked(settings: dict[str, Any], out: Path) -> dict[str, Any]:
    out.mkdir()
    problems = check(settings_from_json(settings), out)
    found: dict[str, Any] = json.loads((out / "check.json").read_text())
    assert found["outcome"] == ("refused" if problems else "ok")
    return found


def test_rows_are_template_prompt_and_greedy_answer(prepared_folder: Path, tiny_target: Path) -> None:
    rows = datasets.load_from_disk(str(prepared_folder / "dataset"))
    facts = json.loads((prepared_folder / "prepare.json").read_text())
    held_out = json.loads((prepared_folder / "evaluation.json").read_text())["prompts"]
    assert (len(rows), len(held_out), facts["rows"]) == (10, 2, 10)
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_target)
    for item in (rows[0], rows[9]):
        start = item["loss_mask"].index(1)
        assert item["loss_mask"] == [0] * start + [1] * (len(item["input_ids"]) - start)
        prompt, reply = item["input_ids"][:start], item["input_ids"][start:]
        text = tokenizer.decode(prompt)
        assert text.startswith("<s> <|user|> w") and text.endswith("<|assistant|>")
        ids = list(prompt)
        with torch.no_grad():
            for token in reply:
                assert int(model(torch.tensor([ids])).logits[0, -1].argmax()) == token
                ids.append(token)
        assert len(reply) == 16


def test_answers_end_with_the_end_token(tiny_target: Path, tmp_path: Path) -> None:
    target = Target.load(tiny_target, [torch.device("cpu")], torch.float32, (0,), tmp_path)
    prompts = [[2, 4, 9, 5], [2, 4, 20, 21, 22, 5]]
    engine = TransformersEngine(target, 8, 2)

    def answers() -> dict[int, list[int]]:
        (piece,) = engine.answers(dict(enumerate(prompts)), frozenset())
        return piece

    plain = answers()
    # the second word of the first answer becomes an end token
    end = plain[0][1]
    target.__dict__["eos_ids"] = frozenset({end})
    cut = answers()
    assert cut[0] == plain[0][: plain[0].index(end) + 1]
    assert cut[1] == (plain[1][: plain[1].index(end) + 1] if end in plain[1] else plain[1])


def test_prompts_plain_and_gzip(tmp_path: Path) -> None:
    lines = '{"prompt": "a"}\n\n{"prompt": "b"}\n'
    (tmp_path / "plain.jsonl").write_text(lines)
    (tmp_path / "packed.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    for name in ("plain.jsonl", "packed.jsonl.gz"):
        found = read_prompts(tmp_path / name, "prompt", 2)
        assert {line: each[0]["content"] for line, each in found.rows.items()} == {1: "a", 3: "b"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"prompt": "a"}\n{"prompt": \n', "p.jsonl:2"),
        ('{"prompts": "a"}\n{"prompts": "b"}\n', "did you mean training.prompt_field: prompts"),
        ("[1]\n[2]\n", "not a JSON object, and 1 more lines are bad"),
        ('{"messages": []}\n' * 2, "its keys are messages"),
        ('{"messages": [{"role": "user", "content": "a"}]}\n' * 2, "did you mean training.prompt_field: messages"),
        ('{"prompt": [{"role": "assistant", "content": "a"}]}\n' * 2, "p.jsonl:1, prompt"),
        ("[1]\n[2]\n", "not a JSON object"),
        ('{"prompt": "a"}\n', "has 1 prompts, 2 are wanted"),
    ],
)
def test_bad_prompts_name_the_line(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "p.jsonl").write_text(text)
    with pytest.raises(InputError, match=said):
        read_prompts(tmp_path / "p.jsonl", "prompt", 2).refuse_malformed(0)


def test_a_tokenizer_without_template_gets_the_bare_text(tiny_target: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_target)
    tokenizer.chat_template = None
    assert prompt_ids([{"role": "user", "content": "w0 w1"}], tokenizer) == [8, 9]


def test_key_changes_with_what_matters_only(make_settings: Any, tmp_path: Path) -> None:
    def key(**overrides: Any) -> str:
        return prepare_key(settings_from_json(make_settings(**overrides)))

    assert key() == key(learning_rate=1e-4, steps=9, drafter_threads=1, block_size=8)
    others = [key(answer_tokens=8), key(prompt_count=11), key(evaluation_prompts=1), key(target_dtype="bfloat16")]
    others += [key(buckets=[64]), key(mask_token="<reserved_1>")]
    assert key(bad_prompts=3) == key()
    assert len({key(), *others}) == 7


def test_check_says_what_to_prepare(make_settings: Any, tmp_path: Path) -> None:
    settings = make_settings()
    found = checked(settings, tmp_path / "out")
    assert found["prepare"]["key"] == prepare_key(settings_from_json(settings))
    assert "12 prompts" in found["prepare"]["why"]


def test_check_names_every_problem(make_settings: Any, tmp_path: Path) -> None:
    found = checked(
        make_settings(require_cuda=not torch.cuda.is_available(), mask_token="</s>", prompt_count=40),
        tmp_path / "out",
    )
    where = [each["where"] for each in found["problems"] if each["where"] != "workload.require_cuda"]
    assert where == ["workload.mask_token", "training.prompt_count"]
    assert torch.cuda.is_available() or len(found["problems"]) == 3
    assert found["prepare"] is None


def test_the_targets_last_layer_is_warned_of_by_check_and_in_the_runs_log(
    make_settings: Any, prepared_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    given = {"prepared": str(prepared_folder), "steps": 1, "evaluation_prompts": 0}
    found = checked(make_settings(target_layers=[1, 4], **given), tmp_path / "check")
    (warning,) = found["warnings"]
    assert found["outcome"] == "ok" and warning["where"] == "workload.target_layers"
    assert "target layer 4 is the last one" in warning["what"] and "below 4" in warning["fix"]
    (tmp_path / "out").mkdir()
    run(settings_from_json(make_settings(target_layers=[1, 4], **given)), tmp_path / "out", evaluate=False)
    assert caplog.text.count("target layer 4 is the last one") == 1
    assert checked(make_settings(target_layers=[1, 3], **given), tmp_path / "below")["warnings"] == []


def test_check_refuses_neither_data_nor_prompts(make_settings: Any, tmp_path: Path) -> None:
    (problem,) = checked(make_settings(prompts=None), tmp_path / "out")["problems"]
    assert problem["where"] == "training.data"


def test_check_refuses_a_mask_token_in_the_data(make_settings: Any, tmp_path: Path) -> None:
    datasets.Dataset.from_dict({"input_ids": [[9, 10, 11], [9, 6, 11]], "loss_mask": [[1, 1, 1]] * 2}).save_to_disk(
        str(tmp_path / "data")
    )
    settings = make_settings(data=str(tmp_path / "data"), prompts=None, evaluation_prompts=0)
    (problem,) = checked(settings, tmp_path / "out")["problems"]
    assert "occurs in the data: rows 1" in problem["what"]
    assert "<reserved_1>" in problem["fix"]
    assert (
        checked(settings | {"workload": settings["workload"] | {"mask_token": 7}}, tmp_path / "two")["prepare"] is None
    )


def test_check_refuses_package_files_that_are_not_there(make_settings: Any, tmp_path: Path) -> None:
    (problem,) = checked(make_settings(prompts="package:json/none.jsonl"), tmp_path / "a")["problems"]
    assert "has no file 'none.jsonl'" in problem["what"] and "decoder.py" in problem["fix"]
    (problem,) = checked(make_settings(prompts="package:not_there_at_all/x"), tmp_path / "b")["problems"]
    assert "is not installed" in problem["what"]
