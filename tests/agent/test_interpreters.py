"""The agent and a job on every Python from 3.9 that is here."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.agent.client import Agent, job, trainer_release

MINORS = range(9, 15)


def interpreters() -> list[str]:
    """One path for each version: on PATH, or built by pyenv."""
    found: dict[int, str] = {}
    for minor in MINORS:
        built = sorted((Path.home() / ".pyenv" / "versions").glob(f"3.{minor}.*/bin/python"))
        for path in [*map(str, built), shutil.which(f"python3.{minor}")]:
            if path and works(path, minor):
                found.setdefault(minor, path)
    return list(found.values())


def works(python: str, minor: int) -> bool:
    """pyenv's shims stand on PATH for versions that are not chosen, and then run nothing."""
    script = "import sys; print(sys.version_info[1])"
    done = subprocess.run([python, "-c", script], capture_output=True, text=True, check=False)
    return done.stdout.strip() == str(minor)


@pytest.mark.parametrize("python", interpreters())
def test_a_whole_conversation(work: Path, python: str) -> None:
    release = trainer_release()
    with Agent(work, python=python) as agent:
        assert agent.call("facts").result["python_executable"]
        agent.call("lock", owner="ann@desk", command="deploy")
        agent.call("stage", digest=release.digest, size=len(release.archive), upload=release.archive)
        assert agent.call("syntax", digest=release.digest, python=python).result == {"files": 2}
        agent.call("activate", digest=release.digest)
        assert agent.call("check", **job(release, python=python)).result["outcome"] == "ok"
        verdict = agent.call("canary", **job(release, python=python, evidence="pass")).result["verdict"]
        assert verdict["outcome"] == "pass"
        agent.call("launch", run="short", **job(release, python=python))
        reply = agent.call("follow", run="short", wait=True)
        assert reply.result["state"] == "SUCCEEDED"
        assert "step 2\n" in reply.log
        agent.call("launch", run="long", **job(release, python=python, forever=True))
        while "ready" not in agent.call("follow", run="long").log:
            pass
        stopped = agent.call("stop", run="long", grace_s=60).result
        assert (stopped["state"], stopped["remaining"]) == ("STOPPED", [])
        assert agent.call("files", run="long").result["files"]


def test_two_bundles_are_the_same() -> None:
    from dflash_ops.agent.bundle import agent_bundle

    first = agent_bundle()
    agent_bundle.cache_clear()
    assert agent_bundle() == first
