"""Who holds the host, as others see it, and how a lock is taken away from one who does not give it back."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.agent.client import SILENT_S, Agent, AgentFailed, Packed, alive, eventually, job
from tests.agent.test_conversation import started_canary


def events(work: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (work / "events.ndjson").read_text().splitlines()]


def unlock(agent: Agent, **arguments: Any) -> dict[str, Any]:
    return agent.call("unlock", owner="bob@lap", **arguments).result


def test_others_see_who_holds_the_host_and_what_runs_there(work: Path, release: Packed) -> None:
    with Agent(work) as first, Agent(work) as second:
        nothing = second.call("holders").result
        assert (nothing["lock"], nothing["leases"]) == (None, [])
        assert unlock(second) == {"lock": None, "agent": "none"}
        started_canary(first, release)
        seen = second.call("holders").result
        lock, (lease,) = seen["lock"], seen["leases"]
        assert (lock["owner"], lock["command"], lock["agent_lives"], lock["stale"]) == (
            "ann@desk",
            "canary",
            True,
            False,
        )
        assert lock["agent"] == lease["agent"] == first.process.pid
        assert (lease["kind"], lease["state"], lease["playbook"]) == ("canary", "RUNNING", "trivial")
        (folder,) = (work / "canary").iterdir()
        assert lease["owner"] == folder.name
        assert lease["since"] >= lock["since"]


def test_a_living_owner_keeps_the_lock_unless_it_is_named(work: Path, release: Packed) -> None:
    with Agent(work) as agent:
        agent.call("stage", digest=release.digest, size=len(release.archive), upload=release.archive)
        arguments = job(release, forever=True)
        agent.call("launch", run="kept", reason="test", **arguments)
        run = agent.call("status", run="kept").result["pid"]
    first = Agent(work)
    # not the canary verb: that is refused beside the run
    first.call("lock", owner="ann@desk", command="deploy")
    with Agent(work) as second:
        for wrong in ({}, {"token": "0" * 16}):
            with pytest.raises(AgentFailed) as caught:
                unlock(second, **wrong)
            assert (caught.value.kind, caught.value.exit) == ("locked", 9)
            assert "ann@desk" in caught.value.what
        assert first.call("holders").result["lock"] is None, "its own is no news"
        token = second.call("holders").result["lock"]["token"]
        done = unlock(second, token=token)
        assert (done["lock"]["owner"], done["agent"]) == ("ann@desk", "ended")
        assert second.call("holders").result["lock"] is None
    assert not alive(first.process.pid)
    # the run belongs to the host
    assert alive(run)
    names = [event["event"] for event in events(work) if "lock" in event["event"]]
    assert names[0] == "lock"
    assert {"lock_lost", "unlock"} <= set(names)
    first.close()


def test_the_one_who_loses_it_is_told_and_its_canary_ends(work: Path, release: Packed) -> None:
    first = Agent(work)
    pids = started_canary(first, release)
    with Agent(work) as second:
        done = unlock(second, token=second.call("holders").result["lock"]["token"])
        assert done["agent"] == "ended"
        assert not any(alive(pid) for pid in pids)
        assert second.call("free", **job(release)).result["devices"]
        assert second.call("verdict", **job(release)).result["verdict"] is None
    with pytest.raises(AgentFailed) as caught:
        first.reply(first._ids)
    assert (caught.value.kind, caught.value.exit) == ("lock_lost", 9)
    assert "bob@lap took the lock over with `unlock`" in caught.value.what
    first.close()


def test_an_agent_that_hangs_is_killed_with_what_it_started(work: Path, release: Packed) -> None:
    first = Agent(work, beat=SILENT_S)
    pids = started_canary(first, release)
    os.kill(first.process.pid, signal.SIGSTOP)
    with Agent(work) as second:
        eventually(lambda: second.call("holders").result["lock"]["stale"])
        # stale, but its process is there and its canary with it
        with pytest.raises(AgentFailed) as caught:
            unlock(second)
        assert caught.value.kind == "locked"
        assert unlock(second, token=second.call("holders").result["lock"]["token"])["agent"] == "killed"
        assert not any(alive(pid) for pid in pids)
        assert second.call("free", **job(release)).result["devices"]
    first.close()


def test_a_dead_agents_lock_is_free_at_once(work: Path, release: Packed) -> None:
    first = Agent(work, beat=600)
    pids = started_canary(first, release)
    first.process.kill()
    first.process.wait()
    with Agent(work) as second:
        held = second.call("holders").result
        assert (held["lock"]["agent_lives"], held["lock"]["stale"], held["leases"]) == (False, True, [])
        assert unlock(second)["agent"] == "gone"
        assert not any(alive(pid) for pid in pids)
    first.close()
    assert [event["job"] for event in events(work) if event["event"] == "orphan_cleared"]
