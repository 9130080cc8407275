"""A run that fills its host's disk: whoever asks is told so, and where."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.agent.client import Agent, Packed, job
from tests.agent.test_spare import fill

pytestmark = pytest.mark.parametrize("small_disk", ["20m"], indirect=True)


@pytest.mark.parametrize("tidy", [False, True])
def test_a_full_disk_is_the_reason(small_disk: Path, release: Packed, tidy: bool) -> None:
    """`tidy`: it takes its half file away, and what it said is the only evidence."""
    filler = small_disk / "runs" / "one" / "out" / "step-000001.part"
    with Agent(small_disk) as agent:
        agent.call("stage", digest=release.digest, size=len(release.archive), upload=release.archive)
        agent.call("launch", run="one", reason="test", **job(release, fill=str(filler), tidy=tidy))
        told = agent.call("wait", run="one").result
        assert told["state"] == "FAILED"
        reason = told["exit"]["reason"]
        assert reason["kind"] == "disk_full"
        assert str(small_disk / "runs/one/out") in reason["path"] and reason["path"] in reason["what"]
        assert (reason["free_bytes"] > 1 << 20) == tidy
        if tidy:
            assert "No space left on device" in reason["what"]
        # what leads out of it works
        agent.call("lock", owner="me@desk", command="prune")


def test_another_failure_is_not_blamed_on_the_disk(small_disk: Path, release: Packed) -> None:
    with Agent(small_disk) as agent:
        agent.call("stage", digest=release.digest, size=len(release.archive), upload=release.archive)
        agent.call("launch", run="one", reason="test", **job(release, exit=3))
        told = agent.call("wait", run="one").result
        assert (told["state"], told["exit"]["reason"]) == ("FAILED", None)


def test_a_full_disk_is_told_of_a_run_that_goes_on(small_disk: Path, release: Packed) -> None:
    with Agent(small_disk) as agent:
        agent.call("stage", digest=release.digest, size=len(release.archive), upload=release.archive)
        agent.call("launch", run="one", reason="test", **job(release, forever=True))
        assert agent.call("status", run="one").result["disk_low"] is None
        fill(small_disk)
        told = agent.call("status", run="one").result
        assert told["state"] == "RUNNING"
        assert str(small_disk) in told["disk_low"]["what"] and told["disk_low"]["free_bytes"] < 1 << 20
        (small_disk / "filler").unlink()
        assert agent.call("stop", run="one", grace_s=5).result["remaining"] == []
