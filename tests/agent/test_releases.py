"""A release arrives whole and read-only, or not at all."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.agent.client import Agent, AgentFailed, Packed, Reply, manifest_of, member, pack, tar_of

FILES = {"pkg/__init__.py": b"", "pkg/deep/mod.py": b"x = 1\n", "run.sh": b"#!/bin/sh\n"}


@pytest.fixture
def good() -> Packed:
    return pack(FILES, frozenset({"run.sh"}))


def stage(agent: Agent, release: Packed, **more: Any) -> Reply:
    return agent.call("stage", digest=release.digest, size=len(release.archive), upload=release.archive, **more)


def test_a_release_is_unpacked_exactly_and_read_only(agent: Agent, work: Path, good: Packed) -> None:
    assert stage(agent, good).result == {"sent": True, "digest": good.digest}
    root = work / "releases" / good.digest
    found = {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}
    assert json.loads(found.pop("manifest.json"))["digest"] == good.digest
    assert found == FILES
    modes = {str(path.relative_to(root)): stat.S_IMODE(path.stat().st_mode) for path in [root, *root.rglob("*")]}
    assert modes == {
        ".": 0o555,
        "manifest.json": 0o444,
        "pkg": 0o555,
        "pkg/__init__.py": 0o444,
        "pkg/deep": 0o555,
        "pkg/deep/mod.py": 0o444,
        "run.sh": 0o555,
    }
    assert [path.name for path in (work / "releases").iterdir()] == [good.digest]
    assert agent.call("facts").result["releases"] == [good.digest]


def test_the_same_release_twice_sends_nothing(agent: Agent, good: Packed) -> None:
    stage(agent, good)
    again = stage(agent, good)
    assert again.result == {"sent": False, "digest": good.digest}
    assert [event["bytes"] for event in again.events] == [0]


def test_a_damaged_release_is_staged_anew(agent: Agent, work: Path, good: Packed) -> None:
    stage(agent, good)
    file = work / "releases" / good.digest / "pkg/deep/mod.py"
    file.chmod(0o644)
    file.write_bytes(b"x = 2\n")
    assert stage(agent, good).result["sent"]
    assert file.read_bytes() == b"x = 1\n"
    assert [path.name for path in (work / "releases").iterdir()] == [good.digest]


def test_a_leftover_of_a_broken_staging_is_no_obstacle(agent: Agent, work: Path, good: Packed) -> None:
    part = work / "releases" / f"{good.digest}.part"
    (part / "pkg").mkdir(parents=True)
    (part / "pkg" / "old.py").touch()
    (part / "pkg").chmod(0o555)
    stage(agent, good)
    assert not (work / "releases" / good.digest / "pkg" / "old.py").exists()


def hostile() -> Iterator[tuple[str, Callable[[], Packed], str]]:
    digest, manifest = manifest_of({"a.py": b"a", "d/b.py": b"b"})
    head = member("manifest.json", json.dumps(manifest).encode())
    a, b = member("a.py", b"a"), member("d/b.py", b"b")

    def packed(*members: tuple[tarfile.TarInfo, bytes], named: str = digest) -> Callable[[], Packed]:
        return lambda: Packed(named, tar_of(list(members)))

    yield "parent folder", packed(head, a, b, member("../evil", b"x")), "'../evil'"
    yield "absolute", packed(head, a, b, member("/tmp/evil-dflash", b"x")), "'/tmp/evil-dflash'"
    yield "extra", packed(head, a, b, member("c.py", b"x")), "'c.py'"
    yield "twice", packed(head, a, b, a), "'a.py'"
    yield "missing", packed(head, a), "'d/b.py' is missing"
    yield "wrong hash", packed(head, member("a.py", b"z"), b), "a.py: sha256"
    yield "wrong size", packed(head, member("a.py", b"aa"), b), "a.py: size"
    yield "wrong mode", packed(head, member("a.py", b"a", 0o755), b), "a.py: size or mode"
    link = {"linkname": "/etc/passwd"}
    yield "symlink", packed(head, member("a.py", type=tarfile.SYMTYPE, **link), b), "not a regular file"
    yield "hard link", packed(head, a, member("d/b.py", type=tarfile.LNKTYPE, linkname="a.py")), "not a regular file"
    yield "device", packed(head, member("a.py", type=tarfile.CHRTYPE, devmajor=1, devminor=3), b), "not a regular"
    yield "pipe", packed(head, member("a.py", type=tarfile.FIFOTYPE), b), "not a regular file"
    yield "linked folder", packed(head, member("d", type=tarfile.SYMTYPE, linkname="/tmp"), a, b), "not a regular file"
    yield "no manifest", packed(a, b), "no manifest.json"
    yield "another digest", packed(head, a, b, named="0" * 64), "make up"
    yield "not an archive", lambda: Packed(digest, b"nonsense"), "refused"
    yield "torn archive", lambda: Packed(digest, tar_of([head, a, b])[:-40]), "refused"
    for name in ("../x.py", "/x.py", "a/../x.py", "./x.py", "a//x.py", "", "manifest.json"):
        bad, listed = manifest_of({name: b"x"})
        yield f"manifest {name!r}", packed(member("manifest.json", json.dumps(listed).encode()), named=bad), "path"
    clash, listed = manifest_of({"a": b"", "a/b": b""})
    yield "file and folder", packed(member("manifest.json", json.dumps(listed).encode()), named=clash), "a folder"


@pytest.mark.parametrize(("make", "says"), [pytest.param(*case[1:], id=case[0]) for case in hostile()])
def test_hostile_archives_are_refused_and_leave_nothing(
    shared: Agent, shared_work: Path, make: Callable[[], Packed], says: str
) -> None:
    with pytest.raises(AgentFailed) as caught:
        stage(shared, make())
    assert (caught.value.kind, caught.value.exit) == ("archive", 3)
    assert says in caught.value.what
    assert list((shared_work / "releases").iterdir()) == []
    assert not (shared_work / "evil").exists()
    assert not Path("/tmp/evil-dflash").exists()


def test_an_upload_longer_than_announced_is_refused(agent: Agent, good: Packed) -> None:
    number = agent.ask("stage", digest=good.digest, size=10)
    assert json.loads(agent.frame()[1])["event"] == "need"
    agent.send(b"D" + (12).to_bytes(4, "big") + bytes(12))
    with pytest.raises(AgentFailed) as caught:
        agent.reply(number)
    assert caught.value.kind == "protocol"


def test_current_and_previous_follow_each_activation(agent: Agent, work: Path, good: Packed) -> None:
    other = pack({"x.py": b"1"})
    for release in (good, other):
        stage(agent, release)
        agent.call("activate", digest=release.digest)
    agent.call("activate", digest=other.digest)
    assert str((work / "current").readlink()) == f"releases/{other.digest}"
    assert str((work / "previous").readlink()) == f"releases/{good.digest}"
    with pytest.raises(AgentFailed) as caught:
        agent.call("activate", digest="0" * 64)
    assert caught.value.kind == "unknown_release"
    events = [json.loads(line) for line in (work / "events.ndjson").read_text().splitlines()]
    assert [event["event"] for event in events] == ["stage", "activate", "stage", "activate"]


def test_syntax_is_of_the_hosts_python_and_leaves_the_release_alone(agent: Agent, work: Path) -> None:
    release = pack({"good.py": b"x = 1\n", "pkg/bad.py": b"\ndef f(:\n  pass\n", "bad2.py": b"\x00"})
    stage(agent, release)
    with pytest.raises(AgentFailed) as caught:
        agent.call("syntax", digest=release.digest, python=sys.executable)
    assert (caught.value.kind, caught.value.exit) == ("syntax", 3)
    lines = {item["path"]: item["line"] for item in caught.value.error["evidence"]}
    assert set(lines) == {"bad2.py", "pkg/bad.py"}
    assert lines["pkg/bad.py"] == 2
    assert not list((work / "releases" / release.digest).rglob("*.pyc"))

    whole = pack({"good.py": b"x = 1\n", "pkg/more.py": b"y = 2\n"})
    stage(agent, whole)
    assert agent.call("syntax", digest=whole.digest, python=sys.executable).result == {"files": 2}


def test_what_compiled_once_is_not_compiled_again_by_the_same_python(agent: Agent, work: Path, tmp_path: Path) -> None:
    python, starts = tmp_path / "python", tmp_path / "starts"

    def write_python(note: str) -> None:
        python.write_text(f'#!/bin/sh\necho {note} >> {starts}\nexec {sys.executable} "$@"\n')
        python.chmod(0o755)

    def files_of(release: Packed) -> int:
        return agent.call("syntax", digest=release.digest, python=str(python)).result["files"]

    def started() -> list[str]:
        return starts.read_text().split()

    write_python("one")
    first, second = (pack({"good.py": b"x = 1\n", "more.py": text}) for text in (b"y = 1\n", b"y = 2\n"))
    for each in (first, second):
        stage(agent, each)
    assert [files_of(each) for each in (first, second, first, second)] == [2, 2, 2, 2]
    assert started() == ["one", "one"], "once for each release"
    python.unlink()
    write_python("another")
    assert files_of(first) == 2
    assert started() == ["one", "one", "another"]
    (work / "compiled.json").write_text('{"damaged')
    assert files_of(first) == 2
    assert len(started()) == 4


def test_what_did_not_compile_is_compiled_again(agent: Agent) -> None:
    release = pack({"bad.py": b"def f(:\n"})
    stage(agent, release)
    for _ in range(2):
        with pytest.raises(AgentFailed) as caught:
            agent.call("syntax", digest=release.digest, python=sys.executable)
        assert caught.value.kind == "syntax"


@pytest.mark.skipif(os.geteuid() != 0, reason="a small file system of its own needs root")
def test_a_full_disk_is_one_clear_error(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", small], check=False)
    if mounted.returncode != 0:
        pytest.skip("this container may not mount a tmpfs")
    try:
        with Agent(small / "work") as agent:
            for data in (os.urandom(1_000_000), bytes(1_000_000)):
                # too large on the wire, or only once it is unpacked
                release = pack({"data.py": data})
                with pytest.raises(AgentFailed) as caught:
                    stage(agent, release)
                assert (caught.value.kind, caught.value.exit) == ("disk_full", 5)
                assert "bytes free" in caught.value.what
                assert "needed" in caught.value.what
                assert list((small / "work" / "releases").iterdir()) == []
    finally:
        subprocess.run(["umount", small], check=True)
