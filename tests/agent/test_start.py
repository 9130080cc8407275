"""The start of a conversation: through shells, past banners, and refused with one clear line."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import json
import os
import shlex
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from dflash_ops.agent.bootstrap import BOOTSTRAP, REFUSED
from dflash_ops.agent.bundle import agent_bundle
from tests.agent.client import Agent, AgentFailed, eventually


def test_bootstrap_is_one_harmless_argument() -> None:
    assert not set(BOOTSTRAP) & set('"\n\\$`!')


def test_noise_before_the_sentinel_and_two_shells_on_the_way(work: Path) -> None:
    def through_two_shells(argv: list[str]) -> list[str]:
        inner = f"echo Welcome; printf no-newline; exec {shlex.join(argv)}"
        return ["sh", "-c", f"exec sh -c {shlex.quote(inner)}"]

    with Agent(work, wrap=through_two_shells) as agent:
        assert agent.noise == b"Welcome\nno-newline"
        assert agent.call("facts").result["workdir"] == str(work)


def test_agent_is_kept_under_its_digest_and_private(work: Path) -> None:
    data, digest = agent_bundle()
    with Agent(work):
        assert (work / "agent" / f"{digest}.pyz").read_bytes() == data
        assert list((work / "agent").iterdir()) == [work / "agent" / f"{digest}.pyz"]
        assert work.stat().st_mode & 0o777 == 0o700


def refused_at(work: Path) -> str:
    data, digest = agent_bundle()
    code, said = refusal(["abc", str(len(data)), digest, str(work)], data)
    assert code == 1
    return str(json.loads(said.rpartition(" abc ")[2])["what"])


def test_a_work_directory_that_everybody_may_write_to_is_refused(work: Path) -> None:
    """Anybody could put another agent in the place of ours."""
    work.mkdir()
    work.chmod(0o777)
    assert refused_at(work) == f"everybody may write to the work directory {work}"
    assert list((work / "agent").iterdir()) == []
    # nobody can take away what is ours there
    work.chmod(0o1777)
    with Agent(work) as agent:
        assert agent.call("facts").result["workdir"] == str(work)


def test_why_it_cannot_be_there_is_said_in_words(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert refused_at(tmp_path / "file/work") == f"Not a directory: {tmp_path}/file/work"


def test_home_is_expanded(tmp_path: Path) -> None:
    with Agent(Path("~/deep/work"), environment={**os.environ, "HOME": str(tmp_path)}) as agent:
        assert agent.call("facts").result["workdir"] == str(tmp_path / "deep" / "work")


def refusal(argv: list[str], data: bytes) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", BOOTSTRAP, *argv], input=data, capture_output=True, check=False
    )
    return done.returncode, done.stdout.decode()


def test_a_damaged_agent_is_refused(work: Path) -> None:
    code, said = refusal(["abc", "3", "0" * 64, str(work)], b"xyz")
    assert code == 1
    assert said.startswith(f"\n{REFUSED} abc {{")
    assert "arrived damaged" in said
    assert '"exit": 4' in said
    assert not work.exists()


def test_a_work_directory_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(AgentFailed) as caught:
        Agent(tmp_path / "file" / "work")
    assert caught.value.exit == 5
    assert str(tmp_path / "file") in caught.value.what


def test_a_work_directory_in_which_a_file_is_in_the_way_is_refused(work: Path) -> None:
    work.mkdir()
    (work / "runs").touch()
    with pytest.raises(AgentFailed) as caught:
        Agent(work)
    assert (caught.value.kind, caught.value.exit) == ("host", 5)
    assert caught.value.error["where"] == str(work / "runs")


def test_all_folders_are_there_once_it_has_spoken(work: Path) -> None:
    with Agent(work):
        there = {path.name for path in work.iterdir() if path.is_dir()}
    assert there == {"agent", "releases", "runs", "canary", "verdicts", "cache", "envs"}


def test_facts_are_of_this_host(agent: Agent, work: Path) -> None:
    facts = agent.call("facts").result
    assert facts["uid"] == os.geteuid()
    assert facts["boot_id"] == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert facts["cpus"] == len(os.sched_getaffinity(0))
    assert facts["disk_free_bytes"] > 0
    assert facts["memory_bytes"] > 0
    assert facts["cgroup"] in (1, 2)
    assert facts["systemd"] == Path("/run/systemd/system").is_dir()
    assert facts["releases"] == []


def compiled(work: Path) -> list[Path]:
    return sorted((work / "agent").glob(f"{agent_bundle()[1]}.*.pyz"))


def started(agent: Agent) -> Path:
    """The file that this agent runs."""
    return Path(Path(f"/proc/{agent.process.pid}/cmdline").read_bytes().split(b"\0")[3].decode())


def test_the_second_agent_starts_with_the_bytecode_that_the_first_has_made(work: Path) -> None:
    plain = work / "agent" / f"{agent_bundle()[1]}.pyz"
    with Agent(work) as agent:
        agent.call("runs")
        assert started(agent) == plain
        (fast,) = eventually(lambda: compiled(work))
    with Agent(work) as agent:
        assert agent.call("runs").result == {"runs": []}
        assert started(agent) == fast
        assert agent.call("facts").result["python_executable"] == sys.executable
    assert compiled(work) == [fast]


def test_bytecode_that_was_damaged_is_passed_over(work: Path) -> None:
    with Agent(work) as agent:
        agent.call("runs")
        (fast,) = eventually(lambda: compiled(work))
    fast.write_bytes(fast.read_bytes()[:-1])
    with Agent(work) as agent:
        assert agent.call("runs").result == {"runs": []}
        assert started(agent) == work / "agent" / f"{agent_bundle()[1]}.pyz"


def test_bytecode_of_another_python_is_passed_over_for_the_source(work: Path) -> None:
    """A Python that was replaced by one whose bytecode is another's, under the same tag."""
    with Agent(work) as agent:
        agent.call("runs")
        (fast,) = eventually(lambda: compiled(work))
    data = fast.read_bytes()
    with zipfile.ZipFile(io.BytesIO(data)) as zipped:
        entries = {info: zipped.read(info) for info in zipped.infolist()}
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as zipped:
        for info, content in entries.items():
            zipped.writestr(info, content.replace(importlib.util.MAGIC_NUMBER, b"\x01\x02\r\n", 1))
    other = buffer.getvalue()
    assert other != data
    fast.unlink()
    tag = str(sys.implementation.cache_tag)
    named = fast.with_name(f"{agent_bundle()[1]}.{tag}.{hashlib.sha256(other).hexdigest()}.pyz")
    named.write_bytes(other)
    with Agent(work) as agent:
        assert agent.call("runs").result == {"runs": []}
        assert started(agent) == named
