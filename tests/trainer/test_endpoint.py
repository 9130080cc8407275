"""An OpenAI-compatible endpoint as the engine: the same data as the target here, through trouble of every kind."""

from __future__ import annotations

import json
import logging
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
import transformers

import trainer.endpoint
from tests.trainer.endpoint_server import Behaviour, serving
from tests.trainer.test_conversations import ending_target, made, said, user, written
from trainer.check import check
from trainer.errors import EndpointFailed, InputError
from trainer.prepare import prepare, prepare_key
from trainer.prepared import read_held_out
from trainer.settings import settings_from_json

pytestmark = pytest.mark.torch

__all__ = ["ending_target"]
Json = dict[str, Any]
TALKS = [
    [user(1, 2), said(30), user(3), said(31), user(4, 5, 6)],
    [user(8), said(39), user(9, 10)],
    [user(11, 12, 13)],
    [user(20, 21), said(39), user(22)],
    [user(23)],
]


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


@pytest.fixture
def given(ending_target: Path, make_settings: Any, tmp_path: Path) -> Any:
    """Settings on conversations whose answers end, or are cut."""
    prompts = written(tmp_path / "p.jsonl", [{"prompt": each} for each in TALKS])

    def make(url: str | None = None, *, target: Path = ending_target, **more: Any) -> Json:
        endpoint = {} if url is None else {"engine": "openai", "endpoint": url, "endpoint_concurrency": 3}
        return make_settings(
            target=str(target), prompts=prompts, prompt_count=5, evaluation_prompts=1, answer_tokens=6,
            answer_batch=1, buckets=[96], **endpoint, **more,
        )  # fmt: skip

    return make


@pytest.mark.parametrize("ids", ["token_ids", "response_token_ids", None])
def test_the_same_rows_as_the_target_here(ids: str | None, given: Any, ending_target: Path, tmp_path: Path) -> None:
    here, facts_here = made(given(), tmp_path / "here")
    behaviour = Behaviour(token_ids=ids)
    with serving(ending_target, behaviour) as url:
        there, facts = made(given(url), tmp_path / "there")
    assert there == here
    assert read_held_out(tmp_path / "there") == read_held_out(tmp_path / "here")
    # every turn was asked once, and both endings were met
    assert len(behaviour.prompts) == sum(each["role"] == "user" for talk in TALKS for each in talk)
    assert 0 < facts["ended"] == facts_here["ended"] < 5


def test_the_template_s_variables_are_in_what_either_engine_is_asked_and_in_the_key(
    given: Any, ending_target: Path, tmp_path: Path
) -> None:
    target = tmp_path / "target"
    shutil.copytree(ending_target, target)
    tokenizer = transformers.AutoTokenizer.from_pretrained(target)
    tokenizer.chat_template = "{% if opening %}{{ opening }} {% endif %}" + tokenizer.chat_template
    tokenizer.save_pretrained(target)
    # another beginning, other answers: one of them is empty
    opened = {"target": target, "chat_template_kwargs": {"opening": "w5"}, "bad_prompts": 2}
    here, _ = made(given(**opened), tmp_path / "here")
    behaviour = Behaviour()
    with serving(target, behaviour) as url:
        there, _ = made(given(url, **opened), tmp_path / "there")
        asked = list(behaviour.prompts)
        plain, _ = made(given(url, target=target), tmp_path / "plain")
    first = tokenizer.convert_tokens_to_ids("w5")
    assert there == here and all(each["input_ids"][0] == first for each in here)
    assert asked and all(each[0] == first for each in asked)
    assert all(each["input_ids"][0] == tokenizer.bos_token_id for each in plain)
    keys = [given(target=target, chat_template_kwargs=each) for each in (None, {}, {"opening": "w5"}, {"opening": 1})]
    keys = [prepare_key(settings_from_json(each)) for each in keys]
    assert keys[0] == keys[1] and len(set(keys)) == 3
    misspelt = settings_from_json(given(target=target, chat_template_kwargs={"openin": "w5"}))
    (problem,) = check(misspelt, tmp_path_with(tmp_path, "check"))
    assert (problem.where, problem.fix) == ("training.chat_template_kwargs", "did you mean 'opening'?")
    with pytest.raises(InputError, match="does not read 'openin'"):
        prepare(misspelt, tmp_path_with(tmp_path, "refused"))


def test_trouble_passes(given: Any, ending_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer.endpoint, "_FIRST_WAIT_S", 0.01)
    here, _ = made(given(), tmp_path / "here")
    behaviour = Behaviour(trouble=[429, 503, "cut", 500, 429])
    with serving(ending_target, behaviour) as url:
        there, _ = made(given(url), tmp_path / "there")
    assert there == here and not behaviour.trouble


def test_what_was_answered_before_an_endpoint_went_is_not_asked_again(
    given: Any, ending_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer.endpoint, "_FIRST_WAIT_S", 0.01)
    monkeypatch.setattr(trainer.endpoint, "_TRIES", 2)
    made(given(), tmp_path / "here")
    out = tmp_path / "there"
    out.mkdir()
    first = Behaviour(dies_after=3)
    with serving(ending_target, first) as url, pytest.raises(EndpointFailed, match="was asked 2 times"):
        prepare(settings_from_json(given(url)), out)
    with socket.socket() as nobody:
        # a port that is taken, and where nobody listens
        nobody.bind(("127.0.0.1", 0))
        closed = f"http://127.0.0.1:{nobody.getsockname()[1]}/v1"
        with pytest.raises(EndpointFailed, match="Connection"):
            prepare(settings_from_json(given(closed)), out)
    kept = sum(len(json.loads(line).get("rows", [])) for line in (out / "answers.ndjson").read_text().splitlines())
    assert 1 <= kept <= 3
    again = Behaviour()
    with serving(ending_target, again) as url:
        # another port: the same data
        prepare(settings_from_json(given(url)), out)
    assert len(again.prompts) == 9 - kept
    assert (out / "dataset" / "data-00000-of-00001.arrow").read_bytes() == (
        tmp_path / "here" / "dataset" / "data-00000-of-00001.arrow"
    ).read_bytes()


def tmp_path_with(folder: Path, name: str) -> Path:
    (folder / name).mkdir()
    return folder / name


def test_the_key_comes_from_the_environment_and_is_shown_nowhere(
    given: Any, ending_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with serving(ending_target, Behaviour(key="sk-0123456789")) as url:
        out = tmp_path_with(tmp_path, "out")
        with pytest.raises(InputError, match=r"no such key.*OPENAI_API_KEY"):
            prepare(settings_from_json(given(url)), out)
        monkeypatch.setenv("OPENAI_API_KEY", "sk-0123456789")
        prepare(settings_from_json(given(url)), out)
    kept = b"".join(path.read_bytes() for path in out.rglob("*") if path.is_file())
    assert b"sk-0123456789" not in kept and "sk-0123456789" not in caplog.text


def test_a_model_that_is_not_served_is_refused(given: Any, ending_target: Path, tmp_path: Path) -> None:
    with serving(ending_target, Behaviour(models=("tiny", "other"))) as url:
        with pytest.raises(InputError, match="serves tiny, other") as caught:
            prepare(settings_from_json(given(url)), tmp_path_with(tmp_path, "a"))
        assert caught.value.where == "training.endpoint_model"
        with pytest.raises(InputError, match=r"HTTP 404: .*The model tin does not exist"):
            prepare(settings_from_json(given(url, endpoint_model="tin")), tmp_path_with(tmp_path, "b"))
        prepare(settings_from_json(given(url, endpoint_model="tiny")), tmp_path_with(tmp_path, "c"))


def test_a_text_that_has_no_exact_tokens_is_named(given: Any, ending_target: Path, tmp_path: Path) -> None:
    double = Behaviour(token_ids=None, spoken=lambda text: text.replace(" ", "  "))
    with serving(ending_target, double) as url, pytest.raises(InputError, match=r"cannot be used: not_exact"):
        prepare(settings_from_json(given(url)), tmp_path_with(tmp_path, "out"))


def test_what_the_server_refuses_is_told_in_its_words(given: Any, ending_target: Path, tmp_path: Path) -> None:
    with (
        serving(ending_target, Behaviour(trouble=[400])) as url,
        pytest.raises(InputError, match=r"HTTP 400: .*trouble"),
    ):
        prepare(settings_from_json(given(url)), tmp_path_with(tmp_path, "out"))


def test_check_names_the_endpoint_and_its_url_is_no_part_of_the_key(given: Any, tmp_path: Path) -> None:
    settings = settings_from_json(given("http://127.0.0.1:9/v1"))
    assert check(settings, tmp_path_with(tmp_path, "out")) == []
    found = json.loads((tmp_path / "out" / "check.json").read_text())
    assert "at http://127.0.0.1:9/v1" in found["prepare"]["why"]
    assert prepare_key(settings) == prepare_key(settings_from_json(given("http://127.0.0.1:10/v1")))
    assert len({prepare_key(settings_from_json(each)) for each in (
        given(), given("http://a/v1"), given("http://a/v1", endpoint_model="b")
    )}) == 3  # fmt: skip
