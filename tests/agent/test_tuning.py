"""`tune`: the table of the trainer is brought, and what `auto` means by it is part of a verdict's binding."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.agent.client import Agent, AgentFailed, Packed, alive, eventually, job


def auto(release: Packed, **act: Any) -> dict[str, Any]:
    arguments = job(release, **act)
    arguments["settings"]["workload"]["strategy"] = "auto"
    return arguments


def test_the_table_is_the_answer_also_where_no_strategy_is_right(agent: Agent, work: Path, staged: Packed) -> None:
    reply = agent.call("tune", timeout_s=60, **auto(staged, fastest="eager"))
    assert reply.result["tuning"]["fastest"] == "eager"
    assert reply.log.startswith("stdin 0 bytes\ntune of None in ")
    assert list((work / "scratch").iterdir()) == []
    none = agent.call("tune", timeout_s=60, **auto(staged, fastest=None, exit=6))
    assert none.result["tuning"]["fastest"] is None
    told = [json.loads(line) for line in (work / "events.ndjson").read_text().splitlines()]
    assert [(one["key"], one["fastest"]) for one in told if one["event"] == "tune"] == [
        ("ab" * 8, "eager"),
        ("ab" * 8, None),
    ]


@pytest.mark.parametrize(
    ("act", "kind", "code"),
    [
        ({"exit": 0}, "trainer", 8),
        ({"fastest": "eager", "exit": 6}, "trainer", 8),
        ({"fastest": None, "exit": 0}, "trainer", 8),
        ({"fastest": "eager", "exit": 1}, "trainer", 8),
        ({"exit": 2}, "refused", 2),
    ],
)
def test_a_table_that_its_exit_code_denies_is_none(
    agent: Agent, staged: Packed, act: dict[str, Any], kind: str, code: int
) -> None:
    with pytest.raises(AgentFailed) as caught:
        agent.call("tune", timeout_s=60, **auto(staged, **act))
    assert (caught.value.kind, caught.value.exit) == (kind, code)


def test_a_verdict_of_auto_is_bound_to_the_tables_that_fit(agent: Agent, work: Path, staged: Packed) -> None:
    proof = {"evidence": "pass"}
    agent.call("tune", timeout_s=60, **auto(staged, fastest="eager"))
    verdict = agent.call("canary", timeout_s=60, **auto(staged, **proof)).result["verdict"]
    assert verdict["binding"]["tuning"] == {"ab" * 8: "eager"}
    named = agent.call("canary", timeout_s=60, **job(staged, **proof)).result["verdict"]
    assert named["binding"]["tuning"] == {}

    assert agent.call("verdict", **auto(staged)).result["holds"]
    # the same choice again, a table of other shapes, and what is no table: nothing to it
    agent.call("tune", timeout_s=60, **auto(staged, fastest="eager"))
    folder = work / "cache" / "tuning"
    (folder / f"{'cd' * 8}.json").write_text(json.dumps({"shapes": {"threads": 3}, "fastest": "default"}))
    (folder / f"{'ef' * 8}.json").write_text("[]")
    (folder / f"{'01' * 8}.json").symlink_to(folder / f"{'cd' * 8}.json")
    assert agent.call("verdict", **auto(staged)).result["holds"]

    agent.call("tune", timeout_s=60, **auto(staged, fastest="default"))
    answer = agent.call("verdict", **auto(staged)).result
    assert not answer["holds"]
    assert "another choice of strategy `auto`" in answer["why"]
    with pytest.raises(AgentFailed) as caught:
        agent.call("launch", run="never", **auto(staged))
    assert caught.value.kind == "gate"
    assert agent.call("verdict", **job(staged)).result["holds"]


def test_a_tuning_whose_agent_is_killed_ends_and_leaves_no_lease(work: Path, staged: Packed) -> None:
    agent = Agent(work)
    agent.ask("tune", timeout_s=60, **auto(staged, hang=True))
    (marker,) = eventually(lambda: list(work.glob("scratch/*/running.json")))
    assert json.loads(marker.read_text())["verb"] == "tune"
    with Agent(work) as other:
        with pytest.raises(AgentFailed) as caught:
            other.call("free", **job(staged))
        assert caught.value.kind == "busy"
        assert "tune" in caught.value.what
        agent.process.send_signal(signal.SIGKILL)
        agent.close()
        other.call("lock", owner="me@here", command="test")
        eventually(lambda: not list(work.glob("scratch/*")))
        assert other.call("free", **job(staged)).result == {"devices": ["cpu"]}
    assert not alive(agent.process.pid)
