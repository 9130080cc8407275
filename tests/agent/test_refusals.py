"""A trainer that refuses its settings or its input: every verb hands its own words on, and none makes a verdict."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.agent.client import Agent, AgentFailed, Packed, job

SECRET = "hunter2-hunter2"
REFUSAL = {"contract": 1, "what": "shard 3 is cut short", "where": "training.data: /d/3", "fix": "make it again"}
MORE: dict[str, dict[str, Any]] = {"canary": {}, "tune": {}, "prepare": {"key": "k" * 16}}


def refusal_of(agent: Agent, verb: str, release: Packed, refused: object, **act: Any) -> dict[str, Any]:
    with pytest.raises(AgentFailed) as caught:
        agent.call(verb, **MORE[verb], **job(release, refused=refused, **act))
    return caught.value.error


@pytest.mark.parametrize("verb", MORE)
def test_what_was_refused_where_and_the_nearest_right_thing(agent: Agent, staged: Packed, verb: str) -> None:
    error = refusal_of(agent, verb, staged, REFUSAL)
    assert (error["kind"], error["exit"]) == ("refused", 2)
    assert (error["what"], error["fix"]) == (REFUSAL["what"], REFUSAL["fix"])
    assert error["where"] == f"trainer, verb {verb}, {REFUSAL['where']}"
    assert error["evidence"][-1] == "no such shard: shard 3"


@pytest.mark.parametrize("file", [None, {"what": None}, {"contract": 1}])
def test_a_trainer_that_wrote_no_such_file_says_it_in_its_last_line(agent: Agent, staged: Packed, file: object) -> None:
    error = refusal_of(agent, "canary", staged, file)
    assert (error["kind"], error["exit"], error["what"]) == ("refused", 2, "no such shard: shard 3")


def test_a_refusal_is_no_verdict(agent: Agent, work: Path, staged: Packed) -> None:
    agent.call("canary", **job(staged, evidence="pass"))
    refusal_of(agent, "canary", staged, REFUSAL, evidence="pass")
    answer = agent.call("verdict", **job(staged)).result
    assert (answer["verdict"], answer["holds"]) == (None, False)
    last = json.loads((work / "events.ndjson").read_text().splitlines()[-1])
    assert (last["event"], last["outcome"]) == ("canary_end", "refused")


def test_a_secret_in_a_refusal_is_masked(agent: Agent, staged: Packed) -> None:
    with pytest.raises(AgentFailed) as caught:
        told = {**REFUSAL, "what": f"{SECRET} is no key", "fix": f"not {SECRET}"}
        agent.call("canary", secrets={"SECRET": SECRET}, **job(staged, refused=told))
    assert (caught.value.what, caught.value.error["fix"]) == ("*** is no key", "not ***")


def test_what_an_earlier_prepare_refused_is_not_said_again(agent: Agent, work: Path, staged: Packed) -> None:
    refusal_of(agent, "prepare", staged, REFUSAL)
    error = refusal_of(agent, "prepare", staged, None)
    assert error["what"] == "no such shard: shard 3"
    path = Path(agent.call("prepare", key="k" * 16, **job(staged)).result["path"])
    assert not (path / "refused.json").exists()


def test_a_run_that_its_trainer_refused_says_so(agent: Agent, staged: Packed) -> None:
    told = {**REFUSAL, "what": f"{SECRET} is no key"}
    arguments = job(staged, refused=told)
    agent.call("launch", run="refused", reason="no canary", secrets={"SECRET": SECRET}, **arguments)
    ended = agent.call("follow", run="refused", wait=True).result
    assert (ended["state"], ended["exit"]["code"]) == ("FAILED", 2)
    what = f"the trainer refused: *** is no key ({REFUSAL['where']})"
    assert ended["exit"]["reason"] == {"kind": "refused", "what": what, "fix": REFUSAL["fix"]}
