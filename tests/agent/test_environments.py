"""Managed environments: built on the host from a lock, whole or absent, once for each, and never pulled from a run."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pwd
import signal
import socket
import subprocess
import tempfile
import venv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dflash_ops.agent.builds import Build
from dflash_ops.agent.frames import JSON
from dflash_ops.agent.workdir import WorkDir
from tests.agent.client import Agent, AgentFailed, Packed, alive, bare_python, eventually, job, trainer_release
from tests.wheels import Index, locked, make_wheel, serving

SCRIPT = "def main():\n    import sys\n    print(sys.prefix)\n"


@dataclass(frozen=True)
class Wheels:
    folder: Path
    one: Path
    two: Path

    @property
    def lock(self) -> str:
        return locked(self.one, self.two)

    def arguments(self, **more: Any) -> dict[str, Any]:
        return {"python": bare_python(), "lock": self.lock, "wheels": str(self.folder), **more}


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Wheels:
    folder = tmp_path_factory.mktemp("wheels")
    one = make_wheel(folder, "tiny_one", code=SCRIPT, script="say-one")
    return Wheels(folder, one, make_wheel(folder, "tiny_two", requires="absent"))


@pytest.fixture(scope="module")
def built(shared: Agent, wheels: Wheels) -> dict[str, Any]:
    """The environment of these wheels, in the work directory of `shared`."""
    return shared.call("environment", **wheels.arguments()).result


def entries(work: Path) -> set[str]:
    """What lies in envs/, without what belongs to the making of each."""
    names = {path.name for path in (work / "envs").iterdir()} - {".trash"}
    return {name for name in names if not name.endswith((".log", ".lock"))}


def output_of(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_it_holds_what_the_lock_names_and_nothing_else(
    shared: Agent, shared_work: Path, wheels: Wheels, built: dict[str, Any]
) -> None:
    folder = shared_work / "envs" / built["digest"]
    assert built["python"] == str(folder / "bin" / "python")
    assert not built["reused"]
    assert entries(shared_work) == {built["digest"]}
    assert "Successfully installed tiny_one-1.0 tiny_two-1.0" in (folder.parent / f"{folder.name}.log").read_text()
    found = shared.call("probe", python=built["python"]).result
    assert found["packages"] == {"tiny-one": "1.0", "tiny-two": "1.0"}
    assert found["digest"] == found["managed"] == built["digest"]
    assert built["complaints"] == ["tiny-two 1.0 requires absent, which is not installed."]
    # scripts start the interpreter under the name that it has now
    assert output_of(str(folder / "bin" / "say-one")) == str(folder)
    # readable for the job's account, writable for nobody
    assert {path.lstat().st_mode & 0o222 for path in [folder, *folder.rglob("*")] if not path.is_symlink()} == {0}
    assert {path.stat().st_mode & 0o444 for path in [folder, *folder.rglob("*")]} == {0o444}


def test_a_second_time_nothing_is_built(shared: Agent, wheels: Wheels, built: dict[str, Any], tmp_path: Path) -> None:
    """Neither comments nor the order make another lock; the wheels need not be there any more."""
    assert shared.call("environment", dry_run=True, **wheels.arguments()).result["python"] == built["python"]
    other = f"# another comment\n{locked(wheels.two, wheels.one)}"
    again = shared.call("environment", **wheels.arguments(lock=other, wheels=str(tmp_path / "gone")))
    assert again.result == {**built, "reused": True}
    assert (again.events, again.log) == ([], "")


def test_another_lock_is_another_environment(shared: Agent, wheels: Wheels, built: dict[str, Any]) -> None:
    asked = shared.call("environment", dry_run=True, **wheels.arguments(lock=locked(wheels.one))).result
    assert (asked["python"], asked["building"], asked["reused"]) == (None, False, False)
    assert asked["digest"] != built["digest"]


def test_a_verdict_is_bound_to_it_and_falls_with_its_files(
    shared: Agent, shared_work: Path, wheels: Wheels, built: dict[str, Any]
) -> None:
    release = trainer_release()
    shared.call("stage", digest=release.digest, size=len(release.archive), upload=release.archive)
    arguments = job(release, python=built["python"], evidence="pass")
    verdict = shared.call("canary", **arguments).result["verdict"]
    assert verdict["binding"]["environment"] == built["digest"]
    shared.call("launch", run="one", **arguments)
    shared.call("follow", run="one", wait=True)
    record = json.loads((shared_work / "runs" / "one" / "run.json").read_text())
    assert (record["managed"], record["packages"]) == (built["digest"], {"tiny-one": "1.0", "tiny-two": "1.0"})
    status = shared.call("status", run="one").result
    assert (status["managed"], status["python"]) == (built["digest"], built["python"])

    changed = next((shared_work / "envs" / built["digest"]).glob("lib/*/site-packages/tiny_one.py"))
    before = changed.stat()
    changed.chmod(0o644)
    changed.write_text(SCRIPT.replace("prefix", "path"))
    with pytest.raises(AgentFailed) as caught:
        shared.call("launch", run="two", **arguments)
    assert (caught.value.kind, caught.value.exit) == ("gate", 7)
    assert "files were changed" in caught.value.what
    # a damaged one is told, and is as good as none
    assert shared.call("environment", dry_run=True, **wheels.arguments()).result["python"] is None
    changed.write_text(SCRIPT)
    os.utime(changed, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert shared.call("verdict", **arguments).result["holds"]


def test_a_hash_that_does_not_fit_names_the_package_and_leaves_nothing(
    shared: Agent, shared_work: Path, wheels: Wheels
) -> None:
    wrong = locked(wheels.one, wheels.two, hashes={"tiny_two": "0" * 64})
    before = entries(shared_work)
    with pytest.raises(AgentFailed) as caught:
        shared.call("environment", **wheels.arguments(lock=wrong))
    assert (caught.value.kind, caught.value.exit) == ("environment", 5)
    sha256 = hashlib.sha256(wheels.two.read_bytes()).hexdigest()
    assert f"tiny_two==1.0 is not what the lock names: the lock says {'0' * 64}, it is {sha256}" in caught.value.what
    (part,) = entries(shared_work) - before
    assert not (shared_work / "envs" / part / "venv").exists()
    # prune clears away what is left of it
    limits = {"keep_runs": 9, "keep_releases": 9, "keep_environments": 9, "keep_prepared": 9, "keep_assets": 9}
    items = shared.call("prune", dry_run=False, **limits).result["items"]
    assert [(one["name"], one["why"]) for one in items if one["fate"] == "goes"] == [(part, "it was never finished")]
    assert entries(shared_work) == before


def test_without_a_way_to_an_index_it_says_how_to_bring_wheels(agent: Agent, wheels: Wheels) -> None:
    with socket.socket() as deaf, pytest.raises(AgentFailed) as caught:
        # its port is ours, and nobody listens there
        deaf.bind(("127.0.0.1", 0))
        variables = {"PIP_INDEX_URL": f"http://127.0.0.1:{deaf.getsockname()[1]}/simple", "PIP_RETRIES": "1"}
        agent.call("environment", python=bare_python(), lock=wheels.lock, environment=variables)
    assert (caught.value.kind, caught.value.exit) == ("environment", 5)
    assert "reaches no package index" in caught.value.what
    assert "pip download --no-deps --require-hashes" in caught.value.error["fix"]


def test_what_cannot_be_built_is_said_before_it_is_begun(shared: Agent, wheels: Wheels, tmp_path: Path) -> None:
    """Also by the doctor, which changes nothing."""
    venv.create(tmp_path / "bare", with_pip=False, symlinks=True)
    site = next((tmp_path / "bare").glob("lib/*/site-packages"))
    # as Debian without its package python3-venv
    (site / "no.pth").write_text("import sys; sys.modules['ensurepip'] = None\n")
    for change, kind, words in (
        ({"python": str(tmp_path / "bare/bin/python")}, "environment", "it has no ensurepip"),
        ({"wheels": str(tmp_path / "nowhere")}, "environment", "there is no wheel folder"),
        ({"version": "2.7"}, "python_version", "is made for Python 2.7"),
        ({"lock": "numpy==1.0\n"}, "request", "line 1 of the lock: 'numpy==1.0' has no hash"),
    ):
        arguments = wheels.arguments(lock=locked(wheels.two)) | change
        for dry_run in (True, False):
            with pytest.raises(AgentFailed) as caught:
                shared.call("environment", dry_run=dry_run, **arguments)
            assert caught.value.kind == kind
            assert words in caught.value.what
            assert caught.value.error["fix"]


@pytest.mark.parametrize("small_disk", ["64m"], indirect=True)
def test_a_disk_that_is_too_small_is_said_before_it_is_begun(small_disk: Path, wheels: Wheels) -> None:
    with Agent(small_disk) as agent, pytest.raises(AgentFailed) as caught:
        agent.call("environment", **wheels.arguments())
    assert (caught.value.kind, caught.value.exit) == ("disk_full", 5)
    assert entries(small_disk) == set()


def builders(work: Path, digest: str) -> list[int]:
    """Pids of the processes that make it."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_bytes().split(b"\0")
            if b"build" in words and digest.encode() in words and str(work).encode() in words:
                found.append(int(path.parent.name))
    return [pid for pid in found if alive(pid)]


def begin(agent: Agent, index: Index, lock: str, **more: Any) -> tuple[int, dict[str, Any]]:
    """Asks for it; the number of the request and the event that tells whether this one began it."""
    number = agent.ask("environment", python=bare_python(), lock=lock, **index.arguments, **more)
    event: dict[str, Any] = {}
    while event.get("event") != "building":
        kind, payload, _ = agent.frame()
        event = json.loads(payload) if kind == JSON else {}
        assert "error" not in event
    return number, event


def test_two_want_it_at_once_and_the_agent_that_began_it_is_killed(work: Path, wheels: Wheels) -> None:
    """From an index with a password, which is nowhere."""
    lock, password = locked(wheels.two), "hunter2-hunter2"
    with serving(wheels.folder, password=password) as index, Agent(work) as first, Agent(work) as second:
        _, event = begin(first, index, lock)
        assert event["begun"]
        eventually(lambda: index.asked)
        number, event = begin(second, index, lock)
        assert not event["begun"]
        first.process.kill()
        first.process.wait()
        with Agent(work) as third:
            # half an environment is none
            asked = third.call("environment", python=bare_python(), lock=lock, dry_run=True).result
            assert (asked["python"], asked["building"]) == (None, True)
        assert entries(work) == {f"{event['environment']}.part"}
        index.gate.set()
        found = second.reply(number)
    # all of the log, also of what was before it came
    assert "making an environment" in found.log
    assert "Successfully installed tiny_two-1.0" in found.log
    assert index.asked == [wheels.two.name]
    assert entries(work) == {event["environment"]}
    eventually(lambda: not builders(work, event["environment"]))
    assert password not in found.log
    kept = [path for path in work.rglob("*") if path.is_file() and not path.is_symlink()]
    assert [path for path in kept if password.encode() in path.read_bytes()] == []


def test_a_builder_that_is_killed_leaves_nothing_that_could_be_used(work: Path, wheels: Wheels) -> None:
    lock = locked(wheels.two)
    with serving(wheels.folder) as index, Agent(work) as agent:
        number, event = begin(agent, index, lock)
        eventually(lambda: index.asked)
        (pid,) = builders(work, event["environment"])
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(AgentFailed) as caught:
            agent.reply(number)
        assert "its builder was killed" in caught.value.what
        mark = Build(WorkDir(work), event["environment"]).mark
        orphans = mark.pids()
        assert orphans, "pip waits for the index still"
        # begun anew: the orphan ends, and its half environment goes
        number, event = begin(agent, index, lock)
        assert event["begun"]
        assert not any(alive(pid) for pid in orphans)
        index.gate.set()
        found = agent.reply(number).result
        assert agent.call("probe", python=found["python"]).result["packages"] == {"tiny-two": "1.0"}
    assert entries(work) == {event["environment"]}


def test_one_that_takes_too_long_is_ended(work: Path, wheels: Wheels) -> None:
    with serving(wheels.folder) as index, Agent(work) as agent:
        with pytest.raises(AgentFailed) as caught:
            agent.reply(begin(agent, index, wheels.lock, timeout_s=5)[0])
        assert "was not finished within 5 s" in caught.value.what
        (part,) = entries(work)
        assert Build(WorkDir(work), part.partition(".")[0]).mark.pids() == []
        assert not (work / "envs" / part / "venv").exists()


def test_while_another_deploy_holds_the_host_none_is_begun(agent: Agent, work: Path, wheels: Wheels) -> None:
    with Agent(work) as other:
        other.call("lock", owner="someone@else", command="deploy")
        with pytest.raises(AgentFailed) as caught:
            agent.call("environment", **wheels.arguments())
    assert (caught.value.kind, caught.value.exit) == ("locked", 9)
    assert entries(work) == set()


def test_a_run_keeps_its_environment(agent: Agent, work: Path, staged: Packed, wheels: Wheels, tmp_path: Path) -> None:
    """Whatever is pruned, asked for or broken while it goes on."""
    used = agent.call("environment", **wheels.arguments()).result
    stop = tmp_path / "stop"
    arguments = job(staged, python=used["python"], hold=str(stop))
    agent.call("launch", run="one", reason="test", **arguments)
    newer = agent.call("environment", **wheels.arguments(lock=locked(wheels.one))).result
    limits = {"keep_runs": 0, "keep_releases": 0, "keep_environments": 0, "keep_prepared": 0, "keep_assets": 0}

    def pruned() -> dict[str, tuple[str, str]]:
        items = agent.call("prune", **limits).result["items"]
        return {one["name"]: (one["fate"], one["why"]) for one in items if one["kind"] == "environment"}

    fates = pruned()
    assert fates[used["digest"]] == ("stays", "run one has it")
    assert fates[newer["digest"]] == ("stays", "current: the last one that was asked for")

    changed = next((work / "envs" / used["digest"]).glob("lib/*/site-packages/tiny_two.py"))
    changed.chmod(0o644)
    changed.write_text("VERSION = 'broken'\n")
    with pytest.raises(AgentFailed) as caught:
        agent.call("environment", **wheels.arguments())
    assert (caught.value.kind, caught.value.exit) == ("environment", 5)
    assert "is damaged (its files were changed after it was built), and run one goes on in it" in caught.value.what

    stop.touch()
    agent.call("follow", run="one", wait=True)
    assert not agent.call("environment", **wheels.arguments()).result["reused"]
    assert "broken" not in changed.read_text()
    assert pruned() == {
        used["digest"]: ("stays", "current: the last one that was asked for"),
        newer["digest"]: ("goes", "older than the 0 newest, and no run that stays has it"),
    }
    assert {path.name for path in (work / "envs").iterdir()} - {".trash"} == {
        used["digest"] + suffix for suffix in ("", ".log", ".lock")
    }


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may start a job as another account")
def test_the_account_of_the_job_can_use_it(wheels: Wheels) -> None:
    python = "/usr/bin/python3"
    if subprocess.run([python, "-c", "import venv, ensurepip"], capture_output=True, check=False).returncode != 0:
        pytest.skip("no python that every account can run makes environments")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        release = trainer_release()
        with Agent(Path(folder) / "work") as agent:
            agent.call("stage", digest=release.digest, size=len(release.archive), upload=release.archive)
            made = agent.call("environment", user="nobody", **wheels.arguments(python=python)).result
            found = agent.call("probe", python=made["python"], user="nobody").result
            assert found["packages"] == {"tiny-one": "1.0", "tiny-two": "1.0"}
            checked = agent.call("check", user="nobody", **job(release, python=made["python"])).result
            assert checked["uid"] == pwd.getpwnam("nobody").pw_uid


def test_one_that_is_gone_is_told(shared: Agent, shared_work: Path) -> None:
    with pytest.raises(AgentFailed) as caught:
        shared.call("probe", python=str(shared_work / "envs" / ("0" * 64) / "bin" / "python"))
    assert (caught.value.kind, caught.value.exit) == ("environment", 5)
