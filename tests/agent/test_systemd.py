"""Under systemd a run is a unit: of a real container, reached the way users reach theirs."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.agent.client import Agent, Packed, eventually, job
from tests.rig.rig import Rig

pytestmark = pytest.mark.rig
PYTHON = "/usr/bin/python3"


@pytest.fixture
def inside(rig: Rig, tmp_path: Path, release: Packed) -> Iterator[Agent]:
    """The agent in the container, the trivial trainer staged."""

    def through_pct(argv: list[str]) -> list[str]:
        return rig.ssh_argv(shlex.join(["pct", "exec", str(rig.container_id), "--", *argv]))

    with Agent(Path(f"/var/lib/{tmp_path.name}"), python=PYTHON, wrap=through_pct) as agent:
        agent.call("stage", digest=release.digest, size=len(release.archive), upload=release.archive)
        yield agent


def launch(agent: Agent, release: Packed, run: str, **act: Any) -> dict[str, Any]:
    arguments = job(release, python=PYTHON, **act)
    return agent.call("launch", run=run, reason="test", policy={"grace_s": 60}, **arguments).result


def show(rig: Rig, unit: str, name: str) -> str:
    return rig.exec_in_container(["systemctl", "show", "--value", "-p", name, f"{unit}.service"]).stdout.strip()


def wait_ready(agent: Agent, run: str) -> None:
    eventually(lambda: "ready" in agent.call("follow", run=run).log)


def test_the_unit_of_a_run_lives_as_long_as_the_run(rig: Rig, inside: Agent, release: Packed) -> None:
    started = launch(inside, release, "unit-a", forever=True)
    assert started["unit"] == "dflash-ops-unit-a"
    wait_ready(inside, "unit-a")
    assert show(rig, started["unit"], "ActiveState") == "active"
    assert show(rig, started["unit"], "KillMode") == "mixed"
    assert show(rig, started["unit"], "OOMPolicy") == "continue"
    group = rig.exec_in_container(["cat", f"/proc/{started['pid']}/cgroup"]).stdout
    assert "dflash-ops-unit-a.service" in group
    assert inside.call("stop", run="unit-a", grace_s=60).result["state"] == "STOPPED"
    # a finished transient unit looks like one that never was, and exit.json is the truth
    eventually(lambda: show(rig, started["unit"], "LoadState") == "not-found")


def test_systemctl_stop_is_a_stop_with_a_checkpoint(rig: Rig, inside: Agent, release: Packed) -> None:
    unit = launch(inside, release, "unit-b", forever=True)["unit"]
    wait_ready(inside, "unit-b")
    assert rig.exec_in_container(["systemctl", "stop", f"{unit}.service"]).returncode == 0
    status = inside.call("follow", run="unit-b", wait=True).result
    assert (status["state"], status["exit"]["code"], status["exit"]["forced"]) == ("STOPPED", 20, False)


def test_a_killed_supervisor_takes_the_unit_along_and_stop_forgets_it(rig: Rig, inside: Agent, release: Packed) -> None:
    unit = launch(inside, release, "unit-c", forever=True)["unit"]
    wait_ready(inside, "unit-c")
    assert (
        rig.exec_in_container(["systemctl", "kill", "-s", "KILL", "--kill-who=main", f"{unit}.service"]).returncode == 0
    )
    eventually(lambda: inside.call("status", run="unit-c").result["state"] == "LOST")
    # the state is known before systemd has ended the rest of the unit
    eventually(lambda: show(rig, unit, "ActiveState") == "failed")
    hint = inside.call("status", run="unit-c").result["hint"]
    assert hint == "systemd has its unit as failed (signal): its supervisor was killed by SIGKILL"
    stopped = inside.call("stop", run="unit-c", grace_s=1).result
    assert (stopped["state"], stopped["remaining"]) == ("LOST", [])
    eventually(lambda: show(rig, unit, "LoadState") == "not-found")
    assert rig.exec_in_container(["systemctl", "--failed", "--quiet", "--plain"]).stdout.count("dflash-ops") == 0


def test_a_restart_is_a_unit_of_its_own(rig: Rig, inside: Agent, release: Packed) -> None:
    policy = {"grace_s": 60, "restarts": 1, "restart_backoff_s": 0}
    arguments = job(release, python=PYTHON, crashes=1, forever=True)
    inside.call("launch", run="unit-d", reason="test", policy=policy, **arguments)
    status = inside.call("wait", run="unit-d").result
    child = status["next"]["run"]
    wait_ready(inside, child)
    # its parent's unit has ended, and did not take it along
    eventually(lambda: show(rig, "dflash-ops-unit-d", "LoadState") == "not-found")
    started = inside.call("status", run=child).result
    assert started["unit"] == f"dflash-ops-{child}"
    assert show(rig, started["unit"], "ActiveState") == "active"
    assert inside.call("stop", run="unit-d", grace_s=60).result["state"] == "STOPPED"


def test_a_container_that_shuts_down_stops_a_prepare_which_then_goes_on(
    rig: Rig, inside: Agent, release: Packed
) -> None:
    never = f"/run/never-{rig.container_id}"
    arguments = {"key": "k" * 16, "policy": {"grace_s": 60}, **job(release, python=PYTHON, until=never)}
    unit = inside.call("launch", run="unit-e", **arguments).result["unit"]
    eventually(lambda: "half of it" in inside.call("follow", run="unit-e").log)
    # as a shutdown does
    assert rig.exec_in_container(["systemctl", "stop", f"{unit}.service"]).returncode == 0
    status = inside.call("follow", run="unit-e", wait=True).result
    assert (status["state"], status["exit"]["signal"], status["exit"]["forced"]) == ("STOPPED", 15, False)
    again = {"key": "k" * 16, "policy": {"grace_s": 60}, **job(release, python=PYTHON)}
    inside.call("launch", run="unit-f", parent="unit-e", **again)
    reply = inside.call("follow", run="unit-f", wait=True)
    assert reply.result["state"] == "SUCCEEDED"
    assert "found ['data.json']" in reply.log
