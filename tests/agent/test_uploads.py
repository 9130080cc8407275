"""An upload that broke off goes on where it was; what arrives is what was announced, or nothing."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path
from typing import Any

import pytest

from dflash_ops.agent.frames import encode_data
from tests.agent.client import Agent, AgentFailed, Packed, eventually, pack


@pytest.fixture
def big() -> Packed:
    return pack({"pkg/__init__.py": b"", "pkg/noise.bin": os.urandom(600_000)})


def wanted(release: Packed) -> dict[str, Any]:
    sha256 = hashlib.sha256(release.archive).hexdigest()
    return {"digest": release.digest, "size": len(release.archive), "sha256": sha256}


def arriving(work: Path, release: Packed) -> Path:
    return work / "releases" / f"{release.digest}.tgz.part"


def broken_off(work: Path, release: Packed, half: int) -> None:
    """An upload whose client goes away after `half` bytes have been written there."""
    with Agent(work) as agent:
        agent.ask("stage", **wanted(release))
        agent.frame()
        agent.send(encode_data(0, release.archive[:half]))
        eventually(lambda: arriving(work, release).stat().st_size == half)


def test_it_goes_on_where_it_broke_off(work: Path, big: Packed) -> None:
    broken_off(work, big, 400_000)
    with Agent(work) as agent:
        reply = agent.call("stage", upload=big.archive, **wanted(big))
    needs = [(event["from"], event["bytes"]) for event in reply.events]
    assert needs == [(400_000, len(big.archive) - 400_000)]
    assert reply.result == {"sent": True, "digest": big.digest}
    assert (work / "releases" / big.digest / "pkg" / "noise.bin").stat().st_size == 600_000
    assert not arriving(work, big).exists()


def test_a_beginning_that_is_not_of_this_archive_is_asked_for_again(work: Path, big: Packed) -> None:
    broken_off(work, big, 400_000)
    with arriving(work, big).open("r+b") as file:
        file.write(b"other bytes")
    with Agent(work) as agent:
        reply = agent.call("stage", upload=big.archive, **wanted(big))
    needs = [(event["from"], event["bytes"]) for event in reply.events]
    assert needs == [(400_000, len(big.archive) - 400_000), (0, len(big.archive))]
    assert (work / "releases" / big.digest).is_dir()


def test_bytes_that_are_not_what_was_announced_are_refused(work: Path, big: Packed) -> None:
    with Agent(work) as agent, pytest.raises(AgentFailed) as refused:
        agent.call("stage", upload=big.archive, **{**wanted(big), "sha256": "0" * 64})
    assert (refused.value.kind, refused.value.exit) == ("archive", 4)
    assert list((work / "releases").iterdir()) == []


def test_what_nobody_took_up_again_for_a_day_goes(work: Path, big: Packed) -> None:
    other = pack({"a.py": b"a"})
    broken_off(work, big, 1000)
    broken_off(work, other, 10)
    old = time.time() - 90_000
    os.utime(arriving(work, big), (old, old))
    third = pack({"b.py": b"b"})
    with Agent(work) as agent:
        agent.call("stage", upload=third.archive, **wanted(third))
    assert not arriving(work, big).exists()
    assert arriving(work, other).exists()


def test_a_frozen_agent_cannot_write_into_the_upload_that_took_its_place(work: Path, big: Packed) -> None:
    frozen = Agent(work)
    frozen.ask("stage", **wanted(big))
    frozen.frame()
    frozen.send(encode_data(0, big.archive[:1000]))
    eventually(lambda: arriving(work, big).stat().st_size == 1000)
    with Agent(work) as agent:
        reply = agent.call("stage", upload=big.archive, **wanted(big))
        assert reply.events[0]["from"] == 0
    frozen.close()
    assert (work / "releases" / big.digest).is_dir()
    assert not arriving(work, big).exists()


def test_requests_sent_ahead_wait_for_the_upload(work: Path, big: Packed) -> None:
    with Agent(work) as agent:
        stage = agent.ask("stage", **wanted(big))
        runs = agent.ask("runs", after=stage)
        assert agent.reply(stage, big.archive).result["sent"]
        assert agent.reply(runs).result == {"runs": []}


def test_what_was_to_follow_a_failed_request_is_skipped(work: Path) -> None:
    with Agent(work) as agent:
        first = agent.ask("status", run="nobody")
        second = agent.ask("runs", after=first)
        third = agent.ask("runs", after=second)
        for number, kind in ((first, "unknown_run"), (second, "skipped"), (third, "skipped")):
            with pytest.raises(AgentFailed) as failed:
                agent.reply(number)
            assert failed.value.kind == kind
        assert agent.call("runs").result == {"runs": []}


def test_a_lock_that_was_given_back_is_free_and_may_be_taken_again(work: Path) -> None:
    with Agent(work) as first, Agent(work) as second:
        first.call("lock", owner="ann@desk", command="deploy")
        first.call("free_lock")
        second.call("lock", owner="bob@lap", command="deploy")
        with pytest.raises(AgentFailed) as locked:
            first.call("lock", owner="ann@desk", command="deploy")
        assert "bob@lap" in locked.value.what
        second.call("free_lock")
        first.call("lock", owner="ann@desk", command="deploy")
