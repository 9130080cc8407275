"""`rollback`: back to the last release before this one whose canary passed on the devices in question."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.agent.client import Agent, AgentFailed, Packed, job, trainer_release
from tests.agent.test_leases import GpuHost

CPU = {"require_cuda": False, "gpus": []}


def build(number: int) -> Packed:
    return trainer_release(**{"number.py": f"number = {number}\n"})


def deployed(agent: Agent, release: Packed, on: dict[str, Any] = CPU, **act: Any) -> None:
    """Staged, current, and judged by its canary; no `evidence`: not judged."""
    agent.call("stage", digest=release.digest, size=len(release.archive), upload=release.archive)
    agent.call("activate", digest=release.digest)
    if act:
        arguments = job(release, **act)
        arguments["settings"]["workload"] = {**on, "threads": 2}
        agent.call("canary", timeout_s=60, **arguments)


def back(agent: Agent) -> dict[str, Any]:
    return agent.call("rollback", workload=CPU).result


def links(work: Path) -> tuple[str, str]:
    return (work / "current").readlink().name, (work / "previous").readlink().name


def test_it_passes_over_what_did_not_pass_and_goes_on_from_there(agent: Agent, work: Path) -> None:
    first, second, failed, unjudged, latest = (build(number) for number in range(5))
    deployed(agent, first, evidence="pass")
    deployed(agent, second, evidence="pass")
    deployed(agent, failed, evidence="fail", exit=6)
    deployed(agent, unjudged)
    deployed(agent, latest, evidence="pass")
    agent.call("launch", run="kept", reason="test", **job(latest))
    before = sorted(path.name for path in (work / "runs/kept").iterdir())
    done = back(agent)
    assert (done["current"], done["previous"], done["devices"]) == (second.digest, latest.digest, ["cpu"])
    assert [one["release"] for one in done["passed_over"]] == [unjudged.digest, failed.digest]
    assert "no canary has decided" in done["passed_over"][0]["why"]
    assert "fail" in done["passed_over"][1]["why"]
    assert links(work) == (second.digest, latest.digest)
    # the run is as it was
    assert agent.call("follow", run="kept", wait=True).result["release"] == latest.digest
    assert set(before) <= {path.name for path in (work / "runs/kept").iterdir()}
    # further back, not forward to what was left
    assert back(agent)["current"] == first.digest
    with pytest.raises(AgentFailed) as caught:
        back(agent)
    assert (caught.value.kind, caught.value.exit) == ("no_release", 2)
    assert links(work) == (first.digest, second.digest)
    # what is activated again can be gone back to again
    deployed(agent, latest)
    deployed(agent, unjudged)
    assert back(agent)["current"] == latest.digest
    last = json.loads((work / "events.ndjson").read_text().splitlines()[-1])
    assert (last["event"], last["release"], last["previous"]) == ("rollback", latest.digest, unjudged.digest)


def test_only_a_whole_release(agent: Agent, work: Path) -> None:
    first, second, third = (build(number) for number in range(3))
    deployed(agent, first, evidence="pass")
    deployed(agent, second, evidence="pass")
    deployed(agent, third, evidence="fail", exit=6)
    file = work / "releases" / second.digest / "number.py"
    file.chmod(0o644)
    file.write_text("number = 9\n")
    done = back(agent)
    assert done["current"] == first.digest
    assert "changed" in done["passed_over"][0]["why"]


def test_a_pass_on_other_devices_does_not_count(tmp_path: Path, work: Path) -> None:
    first, second = build(0), build(1)
    with GpuHost(tmp_path, work).agent() as agent:
        deployed(agent, first, evidence="pass", on={"gpus": [0]})
        deployed(agent, second, evidence="pass", on={"gpus": [1]})
        with pytest.raises(AgentFailed) as caught:
            agent.call("rollback", workload={"gpus": [1]})
        assert "no canary has decided about it on these devices" in caught.value.what
        assert "GPU-bbbb" in caught.value.what
        done = agent.call("rollback", workload={"gpus": [0]}).result
        assert (done["current"], done["devices"]) == (first.digest, ["GPU-aaaa"])


def test_nothing_to_go_back_to(agent: Agent, work: Path) -> None:
    with pytest.raises(AgentFailed) as caught:
        back(agent)
    assert caught.value.kind == "no_release"
    deployed(agent, build(0), evidence="pass")
    with pytest.raises(AgentFailed) as caught:
        back(agent)
    assert caught.value.kind == "no_release"
    assert not (work / "previous").exists()


def test_not_while_another_deploys(agent: Agent, work: Path) -> None:
    with Agent(work) as other:
        other.call("lock", owner="ann@desk", command="deploy")
        with pytest.raises(AgentFailed) as caught:
            back(agent)
        assert caught.value.kind == "locked"


def interrupted_canary(work: Path, release: Packed) -> None:
    """Killed with its agent's client, while it ran."""
    with Agent(work) as another:
        arguments = job(release, hang=True)
        arguments["settings"]["workload"] = {**CPU, "threads": 2}
        another.ask("canary", timeout_s=600, **arguments)
        while b"line 3" not in another.frame()[1]:
            pass


def test_an_interrupted_canary_shuts_the_gate_and_keeps_the_verdict_to_go_back_to(agent: Agent, work: Path) -> None:
    good, unjudged, latest = (build(number) for number in range(3))
    deployed(agent, good, evidence="pass")
    deployed(agent, unjudged)
    deployed(agent, latest, evidence="pass")
    for release in (good, unjudged):
        interrupted_canary(work, release)
    arguments = job(good)
    arguments["settings"]["workload"] = {**CPU, "threads": 2}
    told = agent.call("verdict", **arguments).result
    assert (told["verdict"], told["holds"]) == (None, False)
    assert "begun and never decided" in told["why"]
    with pytest.raises(AgentFailed) as caught:
        agent.call("launch", run="early", **arguments)
    assert (caught.value.kind, caught.value.exit) == ("gate", 7)
    done = back(agent)
    assert done["current"] == good.digest
    (passed_over,) = done["passed_over"]
    assert passed_over["release"] == unjudged.digest
    assert "no canary has decided" in passed_over["why"] and "never decided: ask it anew" in passed_over["why"]
    assert f"--release {unjudged.digest[:12]}" in passed_over["why"]
    # the next one decides
    deployed(agent, good, evidence="pass")
    assert agent.call("verdict", **arguments).result["holds"]
    assert agent.call("launch", run="proven", **arguments).result["run"] == "proven"
