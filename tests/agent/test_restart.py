"""A run that crashed is started again by its host: within its budget, past the gate, and never after a stop."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from dflash_ops.agent.processes import Mark
from tests.agent.client import Agent, AgentFailed, Packed, Reply, alive, eventually, job

FOREVER_S = 100_000
POLICY = {"grace_s": 60, "restarts": 2, "restart_backoff_s": 0}


def launch(agent: Agent, release: Packed, *, policy: dict[str, Any] | None = None, **act: Any) -> dict[str, Any]:
    arguments = {"reason": "test", "policy": {**POLICY, **(policy or {})}, **job(release, **act)}
    return agent.call("launch", run="one", **arguments).result


def chain(agent: Agent, run: str = "one") -> list[dict[str, Any]]:
    """The summaries of a run and of all that it became, each waited for."""
    found = [agent.call("wait", run=run).result]
    while found[-1]["next"] is not None and found[-1]["next"]["run"] is not None:
        found.append(agent.call("wait", run=found[-1]["next"]["run"]).result)
    return found


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def until_it_waits(work: Path) -> dict[str, Any]:
    """next.json of run `one`, once its supervisor waits for the time to start it again."""
    folder = work / "runs" / "one"
    eventually((folder / "exit.json").exists)
    found = read(folder / "next.json")
    assert found["outcome"] == "waiting"
    return found


def supervisor_of(work: Path) -> int:
    return read(work / "runs/one/state.json")["supervisor"]["pid"]


def runs_of(work: Path) -> list[str]:
    return sorted(path.name for path in (work / "runs").iterdir())


def test_without_any_client_from_the_last_checkpoint_until_it_succeeds(work: Path, release: Packed) -> None:
    hold = work.parent / "go"
    with Agent(work) as agent:
        agent.call("stage", digest=release.digest, size=len(release.archive), upload=release.archive)
        act = {"crashes": 2, "hold": str(hold), "policy": {"restart_backoff_s": 0.01}}
        verdict = agent.call("canary", **job(release, evidence="pass")).result["verdict"]
        arguments = {**job(release, **{key: act[key] for key in ("crashes", "hold")}), "policy": POLICY}
        agent.call("launch", run="one", **arguments)
    hold.touch()
    eventually(lambda: len(runs_of(work)) == 3)
    with Agent(work) as agent:
        first, second, third = chain(agent)
        log = agent.call("follow", run=third["run"]).log
    assert [each["state"] for each in (first, second, third)] == ["FAILED", "FAILED", "SUCCEEDED"]
    assert [each["parent"] for each in (first, second, third)] == [None, "one", second["run"]]
    assert [each["next"] and each["next"]["left"] for each in (first, second, third)] == [1, 0, None]
    assert (first["next"]["kind"], first["next"]["outcome"]) == ("restart", "started")
    assert f"from {work}/runs/{second['run']}/out/checkpoints/step-000002" in log
    assert [each["release"] for each in (second, third)] == [release.digest] * 2
    folder = work / "runs" / third["run"]
    assert read(folder / "run.json")["restart"] == 2
    assert read(folder / "verdict.json") == verdict
    assert second["run"].endswith(second["run"][-4:])
    assert "-trivial-" in second["run"]
    events = [json.loads(line) for line in (work / "events.ndjson").read_text().splitlines()]
    launched = [(event["run"], event["parent"]) for event in events if event["event"] == "launch"]
    assert launched == [("one", None), (second["run"], "one"), (third["run"], second["run"])]


def test_a_crash_loop_ends_with_the_budget(agent: Agent, work: Path, staged: Packed) -> None:
    launch(agent, staged, crashes=99, saves=False)
    found = chain(agent)
    assert [each["state"] for each in found] == ["FAILED"] * 3
    assert found[-1]["next"]["outcome"] == "refused"
    assert "all 2 restarts are used up" in found[-1]["next"]["why"]
    assert len(runs_of(work)) == 3
    # without a checkpoint it began anew, and the reason for skipping the canary went along
    assert "from None" in agent.call("follow", run=found[-1]["run"]).log
    assert {each["skipped_canary"] for each in found} == {"test"}


@pytest.mark.parametrize(
    ("act", "state", "why"),
    [
        ({"exit": 0}, "SUCCEEDED", None),
        ({"crashes": 1, "code": 2}, "FAILED", "refused its settings"),
        ({"records": ['{"kind": "step", "step": 9, "loss": NaN}\n']}, "FAILED", "loss is NaN at step 9"),
    ],
)
def test_what_is_not_started_again(
    agent: Agent, work: Path, staged: Packed, act: dict[str, Any], state: str, why: str | None
) -> None:
    launch(agent, staged, **act)
    (only,) = chain(agent)
    assert only["state"] == state
    assert (why is None) == (only["next"] is None)
    assert why is None or why in only["next"]["why"]
    eventually(lambda: not alive(supervisor_of(work)))
    assert runs_of(work) == ["one"]


def test_without_a_budget_nothing_is_started_again(agent: Agent, work: Path, staged: Packed) -> None:
    launch(agent, staged, policy={"restarts": 0}, crashes=1)
    (only,) = chain(agent)
    assert (only["state"], only["next"]) == ("FAILED", None)


def test_a_stop_while_it_waits_ends_the_chain(agent: Agent, work: Path, staged: Packed) -> None:
    launch(agent, staged, policy={"restart_backoff_s": FOREVER_S}, crashes=1)
    waiting = until_it_waits(work)
    assert waiting["left"] == 1
    assert waiting["due"] - read(work / "runs/one/exit.json")["ended"] == pytest.approx(3600, abs=60)
    # until then its devices are its own, and nobody else goes on with it
    for op, arguments in (("launch", {"run": "two", "reason": "test", **job(staged)}), ("resumable", {"run": "one"})):
        with pytest.raises(AgentFailed) as caught:
            agent.call(op, **arguments)
        assert "is about to be started again" in caught.value.what
    stopped = agent.call("stop", run="one").result
    assert (stopped["run"], stopped["state"], stopped["remaining"]) == ("one", "FAILED", [])
    assert stopped["next"]["outcome"] == "stopped"
    eventually(lambda: not alive(supervisor_of(work)))
    assert runs_of(work) == ["one"]
    agent.call("launch", run="two", reason="test", **job(staged))
    assert agent.call("wait", run="two").result["state"] == "SUCCEEDED"


def test_a_signal_to_its_supervisor_while_it_waits_ends_the_chain(work: Path, release: Packed) -> None:
    with Agent(work) as agent:
        agent.call("stage", digest=release.digest, size=len(release.archive), upload=release.archive)
        launch(agent, release, policy={"restart_backoff_s": FOREVER_S}, crashes=1)
        until_it_waits(work)

        def end_it(reply: Reply) -> None:
            if reply.events and reply.events[-1]["event"] == "starts_again":
                os.kill(supervisor_of(work), signal.SIGTERM)

        for op in ("wait", "follow"):
            reply = agent.reply(agent.ask(op, run="one", wait=True), seen=end_it)
            assert reply.result["next"]["outcome"] == "stopped"
            told = [event for event in reply.events if event["event"] == "starts_again"]
            # whoever comes later finds it decided
            assert [event["left"] for event in told] == ([1] if op == "wait" else [])
        assert agent.call("resumable", run="one").result["step"] == 1


def test_a_supervisor_that_dies_while_it_waits_holds_nothing(agent: Agent, work: Path, staged: Packed) -> None:
    launch(agent, staged, policy={"restart_backoff_s": FOREVER_S}, crashes=1)
    until_it_waits(work)
    os.kill(supervisor_of(work), signal.SIGKILL)
    (only,) = chain(agent)
    assert only["next"]["outcome"] == "refused"
    assert "did not live" in only["next"]["why"]
    assert agent.call("free", **job(staged)).result["devices"] == only["devices"]
    assert agent.call("resumable", run="one").result["step"] == 1


def test_a_stop_by_the_first_name_stops_what_it_has_become(agent: Agent, work: Path, staged: Packed) -> None:
    launch(agent, staged, crashes=1, forever=True)
    child = agent.call("wait", run="one").result["next"]["run"]
    eventually(lambda: "ready" in agent.call("follow", run=child).log)
    stopped = agent.call("stop", run="one", grace_s=60).result
    assert (stopped["run"], stopped["state"], stopped["next"]) == (child, "STOPPED", None)
    assert Mark.of_run(work, child).pids() == []
    assert len(runs_of(work)) == 2


def test_a_crash_while_a_stop_is_asked_for_is_not_followed_by_a_restart(
    agent: Agent, work: Path, staged: Packed
) -> None:
    hold = work.parent / "go"
    pid = launch(agent, staged, crashes=1, hold=str(hold))["pid"]
    eventually(lambda: "holding" in agent.call("follow", run="one").log)
    supervisor = supervisor_of(work)
    os.kill(supervisor, signal.SIGSTOP)
    number = agent.ask("stop", run="one", grace_s=60)
    eventually((work / "runs/one/stop.json").exists)
    hold.touch()
    eventually(lambda: not alive(pid))
    os.kill(supervisor, signal.SIGCONT)
    stopped = agent.reply(number).result
    # FAILED where its supervisor saw the crash first: then the request is seen before the restart
    assert (stopped["run"], stopped["exit"]["code"]) == ("one", 1)
    assert stopped["state"] == "STOPPED" or stopped["next"]["outcome"] == "stopped"
    eventually(lambda: not alive(supervisor))
    assert runs_of(work) == ["one"]


def test_without_a_verdict_that_holds_it_is_not_started_again(agent: Agent, work: Path, staged: Packed) -> None:
    verdict = agent.call("canary", **job(staged, evidence="pass")).result["verdict"]
    hold = work.parent / "go"
    agent.call("launch", run="one", policy=POLICY, **job(staged, crashes=1, hold=str(hold)))
    path = work / "verdicts" / f"{verdict['digest']}.json"
    path.write_text(json.dumps({**verdict, "boottime_s": verdict["boottime_s"] - 90_000}))
    hold.touch()
    (only,) = chain(agent)
    assert only["next"]["outcome"] == "refused"
    assert "over the limit of 24 hours" in only["next"]["why"]
    events = [json.loads(line) for line in (work / "events.ndjson").read_text().splitlines()]
    assert events[-1]["event"] == "restart_refused"
    assert "over the limit" in events[-1]["why"]
    # a person may prove it anew and go on
    assert agent.call("resumable", run="one").result["step"] == 1
    assert runs_of(work) == ["one"]


def test_secrets_and_variables_go_along(agent: Agent, work: Path, staged: Packed) -> None:
    environment = {"environment": {"PLAIN": "seen"}, "secrets": {"SECRET": "a-secret-of-the-test"}}
    arguments = {**job(staged, crashes=1), **environment, "reason": "test", "policy": POLICY}
    agent.call("launch", run="one", **arguments)
    first, second = chain(agent)
    assert [first["state"], second["state"]] == ["FAILED", "SUCCEEDED"]
    record = read(work / "runs" / second["run"] / "run.json")
    assert record["environment"]["PLAIN"] == "seen"
    assert record["secrets"] == ["SECRET"]
    assert not list(work.rglob("secrets.json"))
