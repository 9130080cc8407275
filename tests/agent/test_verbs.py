"""`check` and `prepare`: what a trainer is started with, and how its endings are told."""

from __future__ import annotations

import hashlib
import json
import os
import pwd
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.agent.client import Agent, AgentFailed, Packed, bare_python, job


def test_a_job_gets_the_contracts_settings_and_a_clean_environment(work: Path, release: Packed) -> None:
    with Agent(work, environment={**os.environ, "SECRET": "of the node"}) as agent:
        agent.call("stage", digest=release.digest, size=len(release.archive), upload=release.archive)
        reply = agent.call("check", **job(release))
    root = str(work / "releases" / release.digest)
    seen = reply.result["environment"]
    assert seen.pop("PATH").startswith(str(Path(bare_python()).parent) + ":")
    assert seen == {
        "PYTHONPATH": root,
        "PYTHONDONTWRITEBYTECODE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "HOME": pwd.getpwuid(os.geteuid()).pw_dir,
        "SECRET": None,
    }
    settings = reply.result["settings"]
    assert (settings["contract"], settings["run"], settings["prepared"]) == (1, None, None)
    assert settings["cache"] == str(work / "cache")
    assert reply.log == f"stdin 0 bytes\ncheck of None in {root}\n"
    assert list((work / "scratch").iterdir()) == []


def test_a_refusal_is_an_answer_and_a_crash_an_error(agent: Agent, staged: Packed) -> None:
    assert agent.call("check", **job(staged, check="refused")).result["outcome"] == "refused"
    with pytest.raises(AgentFailed) as caught:
        agent.call("check", **job(staged, crash=True))
    assert (caught.value.kind, caught.value.exit) == ("trainer", 8)
    assert "exit code 1" in caught.value.what
    assert caught.value.error["evidence"][-1] == "RuntimeError: check crashed"


def test_prepared_data_is_made_once_and_only_whole(agent: Agent, work: Path, staged: Packed) -> None:
    key = "k" * 16
    path = work / "cache" / "prepared" / key
    with pytest.raises(AgentFailed) as caught:
        agent.call("prepare", key=key, **job(staged, half=True))
    assert (caught.value.kind, caught.value.exit) == ("trainer", 8)
    assert not (path / "prepare.json").exists()
    for reused in (False, True):
        reply = agent.call("prepare", key=key, **job(staged))
        assert reply.result == {"path": str(path), "reused": reused}
        # it goes on from what is there, and one that is whole is not asked for again
        assert ("found ['data.json']" in reply.log) is not reused
        assert json.loads((path / "prepare.json").read_text()) == {"rows": 3}
        # a deploy that finds it there asks for nothing more
        found = agent.call("check", **job(staged, needs={"key": key, "why": "rows"})).result
        assert found["prepared"] == str(path)
    for other in ("other" * 4, "../../escape", None):
        assert agent.call("check", **job(staged, needs={"key": other, "why": "rows"})).result["prepared"] is None
    with pytest.raises(AgentFailed):
        agent.call("prepare", key="../../escape", **job(staged))


@pytest.fixture
def public_work() -> Iterator[Path]:
    """A work directory that another account can reach: pytest's own folders are private."""
    folder = Path(tempfile.mkdtemp(dir="/var/tmp"))
    folder.chmod(0o755)
    yield folder / "work"
    for path, folders, _ in os.walk(folder):
        for name in folders:
            (Path(path) / name).chmod(0o700)
    shutil.rmtree(folder)


def put_asset(agent: Agent, data: bytes) -> str:
    sha256 = hashlib.sha256(data).hexdigest()
    file = {"path": "weights", "size": len(data), "sha256": sha256}
    agent.call("asset_file", asset=sha256, **file, upload=data)
    return str(agent.call("asset_end", asset=sha256, single=True, files=[file]).result["path"])


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may start a job as another account")


@needs_root
def test_a_job_runs_as_the_account_that_was_asked_for(public_work: Path, release: Packed, tmp_path: Path) -> None:
    nobody = pwd.getpwnam("nobody")
    python = "/usr/bin/python3"
    if not Path(python).exists():
        pytest.skip("no python that every account can run")
    with Agent(public_work) as agent:
        agent.call("stage", digest=release.digest, size=len(release.archive), upload=release.archive)
        asset = put_asset(agent, b"weights")
        arguments = job(release, python=python, evidence="pass", tell="SECRET", read=asset)
        arguments["secrets"] = {"SECRET": "hf_0123456789"}
        found = agent.call("check", user="nobody", **arguments).result
        assert found["uid"] == nobody.pw_uid
        assert found["environment"]["HOME"] == nobody.pw_dir
        path = Path(agent.call("prepare", user="nobody", key="k" * 16, **arguments).result["path"])
        assert (path / "prepare.json").stat().st_uid == nobody.pw_uid
        verdict = agent.call("canary", user="nobody", **arguments).result["verdict"]
        assert verdict["outcome"] == "pass", verdict
        agent.call("launch", user="nobody", run="as-nobody", **arguments)
        reply = agent.call("follow", run="as-nobody", wait=True)
        ended = reply.result
        assert "read 7 bytes\n" in reply.log
        assert "told *** and ***\n" in reply.log
        assert (ended["state"], ended["user"]) == ("SUCCEEDED", "nobody")
    out = public_work / "runs" / "as-nobody" / "out"
    assert (out / "result.json").stat().st_uid == nobody.pw_uid
    # it can pass through, and cannot read what is not its own
    assert public_work.stat().st_mode & 0o777 == 0o711
    assert (public_work / "runs" / "as-nobody" / "run.json").stat().st_mode & 0o077 == 0


@needs_root
def test_what_another_account_began_to_prepare_is_begun_anew(public_work: Path, release: Packed) -> None:
    python = "/usr/bin/python3"
    if not Path(python).exists():
        pytest.skip("no python that every account can run")
    with Agent(public_work) as agent:
        agent.call("stage", digest=release.digest, size=len(release.archive), upload=release.archive)
        with pytest.raises(AgentFailed):
            agent.call("prepare", key="k" * 16, **job(release, half=True))
        reply = agent.call("prepare", user="nobody", key="k" * 16, **job(release, python=python))
    assert "found []" in reply.log
    assert (public_work / "cache/prepared" / ("k" * 16) / "prepare.json").exists()


@needs_root
def test_a_work_directory_out_of_the_accounts_reach_is_an_error(tmp_path: Path, release: Packed) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    with Agent(closed / "work") as agent:
        agent.call("stage", digest=release.digest, size=len(release.archive), upload=release.archive)
        with pytest.raises(AgentFailed) as caught:
            agent.call("check", user="nobody", **job(release))
    assert (caught.value.kind, caught.value.exit) == ("user", 5)
    assert "cannot enter" in caught.value.what


def test_an_unknown_account_is_an_error(agent: Agent, staged: Packed) -> None:
    with pytest.raises(AgentFailed) as caught:
        agent.call("check", user="no-such-account", **job(staged))
    assert (caught.value.kind, caught.value.exit) == ("user", 5)
    assert "no-such-account" in caught.value.what
