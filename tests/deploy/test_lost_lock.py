"""A deploy that loses its host between the verdict and the launch: what it says, and what it knows."""

from __future__ import annotations

import os
import signal

import pytest

from dflash_ops.agent.files import read_json
from dflash_ops.errors import TransportError
from tests.commands import Desk, eventually
from tests.deploy.in_process import failed_deploy, sit_down


@pytest.fixture
def at_desk(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> Desk:
    sit_down(desk, monkeypatch)
    return desk


def kill_the_agent(desk: Desk) -> None:
    owner = read_json(desk.folder / "work" / "lock" / "owner.json")
    assert owner is not None
    os.kill(owner["agent"]["pid"], signal.SIGKILL)


def test_who_took_the_lock_when_is_told(at_desk: Desk) -> None:
    def taken_by_force() -> None:
        assert at_desk.run("unlock", "--force").result["agent"] == "ended"

    error, outcome = failed_deploy("verdict", taken_by_force)
    assert (error.kind, error.exit_code, outcome.run) == ("lock_lost", 9, None)
    assert "with `unlock` at 20" in error.what and "UTC" in error.what
    assert error.fix.startswith("nothing was launched")
    assert at_desk.run("runs").result["runs"] == []

    def taken_and_killed() -> None:
        kill_the_agent(at_desk)
        assert at_desk.run("unlock", "--force").result["agent"] == "gone"

    # nobody is left to tell it
    error, outcome = failed_deploy("verdict", taken_and_killed)
    assert (error.kind, error.exit_code, outcome.run) == ("lock_lost", 9, None)
    assert "with `unlock` at 20" in error.what and error.fix.startswith("nothing was launched")


def test_whether_it_was_launched_is_asked_afterwards(at_desk: Desk) -> None:
    error, outcome = failed_deploy("verdict", lambda: kill_the_agent(at_desk))
    assert (error.exit_code, outcome.run) == (4, None)
    assert error.fix == "nothing was launched; run the same command again"
    assert at_desk.run("runs").result["runs"] == []

    def answer_is_lost() -> None:
        raise TransportError("the link broke", lost=True)

    error, outcome = failed_deploy("launched", answer_is_lost)
    (run,) = at_desk.run("runs").result["runs"]
    assert (error.exit_code, outcome.run) == (4, run)
    assert error.fix == f"run {run} was launched, and goes on: `dflash-ops tail-logs -f {run}`"
    eventually(lambda: at_desk.run("status").result["state"] == "SUCCEEDED")
