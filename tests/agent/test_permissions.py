"""What lies in a work directory is its owner's alone, whatever the umask of who started it."""

from __future__ import annotations

import stat
from pathlib import Path

from tests.agent.client import Agent, Packed, job


def test_nobody_else_may_look_into_a_work_directory(work: Path, release: Packed) -> None:
    with Agent(work, wrap=lambda argv: ["sh", "-c", 'umask 0; exec "$@"', "sh", *argv]) as agent:
        agent.call("stage", digest=release.digest, size=len(release.archive), upload=release.archive)
        agent.call("activate", digest=release.digest)
        arguments = {**job(release, evidence="pass"), "secrets": {"SECRET": "hf_0123456789"}}
        agent.call("prepare", key="k" * 16, **arguments)
        agent.call("canary", **arguments)
        agent.call("launch", run="r", **arguments)
        assert agent.call("follow", run="r", wait=True).result["state"] == "SUCCEEDED"
    open_to_others = {
        str(path.relative_to(work)): oct(stat.S_IMODE(path.lstat().st_mode))
        for path in [work, *work.rglob("*")]
        if not path.is_symlink()
        and path.stat().st_mode & 0o077
        # read-only, and only behind folders that are closed
        and release.digest not in path.parts
    }
    assert open_to_others == {}
    assert (work / "releases").stat().st_mode & 0o077 == 0
    assert (work / "runs" / "r" / "out" / "result.json").exists()
