"""Weights and datasets on the host: found, brought, whole or absent, and at the launch what they were before."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from dflash_ops.agent.fingerprints import Content, HashCache, Listed, content_of
from dflash_ops.agent.frames import encode_data
from tests.agent.client import Agent, AgentFailed, Packed, eventually, job

FILES = {"config.json": b"{}", "deep/weights.bin": bytes(range(256)) * 40, "empty": b""}


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def content(files: dict[str, bytes] = FILES, *, single: bool = False) -> Content:
    return Content(tuple(Listed(name, len(data), sha256(data)) for name, data in sorted(files.items())), single)


def announced(wanted: Content) -> dict[str, Any]:
    return {
        "asset": wanted.fingerprint,
        "single": wanted.single,
        "files": [asdict(file) for file in wanted.files],
    }


def send(agent: Agent, wanted: Content, files: dict[str, bytes], *names: str) -> None:
    for file in wanted.files:
        if file.path in (names or files):
            agent.call("asset_file", asset=wanted.fingerprint, **asdict(file), upload=files[file.path])


def test_a_folder_comes_file_by_file_and_is_there_once_it_is_whole(agent: Agent, work: Path) -> None:
    wanted = content()
    begun = agent.call("asset_begin", **announced(wanted)).result
    assert (begun["path"], begun["missing"]) == (None, sorted(FILES))
    send(agent, wanted, FILES, "config.json")
    begun = agent.call("asset_begin", **announced(wanted)).result
    assert (begun["path"], begun["missing"], begun["bytes"]) == (None, ["deep/weights.bin", "empty"], 256 * 40)
    send(agent, wanted, FILES, "deep/weights.bin", "empty")
    path = Path(agent.call("asset_end", **announced(wanted)).result["path"])
    assert path == work / "assets" / wanted.fingerprint
    assert {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()} == FILES
    assert {file.stat().st_mode & 0o222 for file in [path, *path.rglob("*")]} == {0}
    assert [folder.name for folder in (work / "assets").iterdir()] == [wanted.fingerprint]
    assert agent.call("asset_begin", **announced(wanted)).result["path"] == str(path)
    assert agent.call("asset", path=str(path)).result["sha256"] == wanted.fingerprint


def test_small_files_come_together_and_go_on_where_they_were(work: Path) -> None:
    files = {f"part-{number:03}/row": bytes([number]) * (4096 + number) for number in range(40)}
    wanted, together = content(files), b"".join(files[name] for name in sorted(files))
    about = {"asset": wanted.fingerprint, "files": announced(wanted)["files"], "sha256": sha256(together)}
    with Agent(work) as agent:
        agent.ask("asset_files", **about)
        agent.frame()
        agent.send(encode_data(0, together[:100_000]))
        arrived = work / "assets" / f"{wanted.fingerprint}.part" / "incoming" / sha256(together)
        eventually(lambda: arrived.stat().st_size == 100_000)
        agent.process.kill()
    with Agent(work) as agent:
        reply = agent.call("asset_files", **about, upload=together)
        assert reply.result["sent"] == len(together) - 100_000
        assert agent.call("asset_begin", **announced(wanted)).result["missing"] == []
        path = Path(agent.call("asset_end", **announced(wanted)).result["path"])
    assert {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()} == files
    assert [folder.name for folder in (work / "assets").iterdir()] == [wanted.fingerprint]


def test_small_files_that_are_not_what_they_were_announced_as_get_no_name(agent: Agent, work: Path) -> None:
    wanted = content({"a": b"1", "b": b"2"})
    about = {"asset": wanted.fingerprint, "files": announced(wanted)["files"], "sha256": sha256(b"21")}
    agent.call("asset_files", **about, upload=b"21")
    with pytest.raises(AgentFailed) as caught:
        agent.call("asset_end", **announced(wanted))
    assert (caught.value.kind, caught.value.exit) == ("asset", 4)
    assert list((work / "assets").iterdir()) == []


def test_a_single_file_keeps_its_name(agent: Agent, work: Path) -> None:
    files = {"target.gguf": b"weights"}
    wanted = content(files, single=True)
    send(agent, wanted, files)
    path = agent.call("asset_end", **announced(wanted)).result["path"]
    assert path == str(work / "assets" / sha256(b"weights") / "target.gguf")
    assert agent.call("asset", path=path).result == {
        "path": path,
        "sha256": sha256(b"weights"),
        "size": 7,
        "problem": None,
    }


def test_an_upload_that_broke_off_goes_on_where_it_was(work: Path) -> None:
    data = bytes(range(256)) * 4000
    wanted = content({"big": data})
    with Agent(work) as agent:
        file = asdict(wanted.files[0])
        agent.ask("asset_file", asset=wanted.fingerprint, **file)
        agent.frame()
        agent.send(encode_data(0, data[:500_000]))
        arrived = work / "assets" / f"{wanted.fingerprint}.part" / "incoming" / file["sha256"]
        eventually(lambda: arrived.stat().st_size == 500_000)
        agent.process.kill()
    with Agent(work) as agent:
        # what is told to be sent is what is really left
        assert agent.call("asset_begin", **announced(wanted)).result["bytes"] == len(data) - 500_000
        reply = agent.call("asset_file", asset=wanted.fingerprint, **file, upload=data)
        assert reply.result["sent"] == len(data) - 500_000
        path = Path(agent.call("asset_end", **announced(wanted)).result["path"])
    assert (path / "big").read_bytes() == data


def test_while_another_deploy_holds_the_host_nothing_is_taken(agent: Agent, work: Path) -> None:
    wanted = content()
    with Agent(work) as other:
        other.call("lock", owner="someone@else", command="deploy")
        for op, arguments in (
            ("asset_file", {"asset": wanted.fingerprint, **asdict(wanted.files[0])}),
            ("asset_files", {**announced(wanted), "sha256": "0" * 64}),
            ("asset_end", announced(wanted)),
        ):
            with pytest.raises(AgentFailed) as caught:
                agent.call(op, **arguments)
            assert (caught.value.kind, caught.value.exit) == ("locked", 9)
    assert not (work / "assets").exists()


def test_what_is_not_whole_gets_no_name(agent: Agent, work: Path) -> None:
    wanted = content()
    send(agent, wanted, FILES, "config.json")
    with pytest.raises(AgentFailed) as caught:
        agent.call("asset_end", **announced(wanted))
    assert (caught.value.kind, caught.value.exit) == ("asset", 4)
    assert list((work / "assets").iterdir()) == []


def test_a_file_that_arrives_damaged_is_refused(agent: Agent) -> None:
    wanted = content()
    with pytest.raises(AgentFailed) as caught:
        send(agent, wanted, {**FILES, "deep/weights.bin": bytes(256 * 40)}, "deep/weights.bin")
    assert caught.value.exit == 4
    assert "deep/weights.bin" in agent.call("asset_begin", **announced(wanted)).result["missing"]


def test_one_that_was_damaged_on_the_host_is_brought_again(agent: Agent, work: Path) -> None:
    wanted = content()
    send(agent, wanted, FILES)
    path = Path(agent.call("asset_end", **announced(wanted)).result["path"])
    (path / "config.json").chmod(0o644)
    (path / "config.json").write_bytes(b"[]")
    assert agent.call("asset_begin", **announced(wanted)).result["path"] is None
    send(agent, wanted, FILES)
    agent.call("asset_end", **announced(wanted))
    assert (path / "config.json").read_bytes() == b"{}"
    assert [folder.name for folder in (work / "assets").iterdir()] == [wanted.fingerprint]


@pytest.mark.parametrize("name", ["../evil", "/tmp/dflash-ops-evil", "a/../../evil", ".", "", "a\0b", ".git/x", "a//b"])
def test_a_name_that_leads_elsewhere_is_refused(shared: Agent, shared_work: Path, name: str) -> None:
    wanted = content({name: b"x"})
    with pytest.raises(AgentFailed) as caught:
        shared.call("asset_begin", **announced(wanted))
    assert (caught.value.kind, caught.value.exit) == ("request", 2)
    if not name.startswith(".git"):
        with pytest.raises(AgentFailed) as caught:
            shared.call("asset_file", asset=wanted.fingerprint, **asdict(wanted.files[0]), upload=b"x")
        assert (caught.value.kind, caught.value.exit) == ("request", 2)
    assert not (shared_work / "assets").exists()


def test_files_that_make_up_another_asset_are_refused(shared: Agent) -> None:
    wrong = {**announced(content()), "asset": "0" * 64}
    for arguments in (
        wrong,
        {**wrong, "files": []},
        {**wrong, "files": [1]},
        {**wrong, "files": announced(content())["files"] * 2},
        announced(content({"a": b"", "a/b": b""})),
        {**announced(content()), "single": True},
    ):
        with pytest.raises(AgentFailed) as caught:
            shared.call("asset_begin", **arguments)
        assert (caught.value.kind, caught.value.exit) == ("request", 2)


def test_what_is_not_there_is_told(shared: Agent, tmp_path: Path) -> None:
    found = shared.call("asset", path=str(tmp_path / "nothing")).result
    assert (found["sha256"], found["problem"]) == (None, "there is nothing of that name")


def test_an_asset_that_changed_after_it_was_checked_is_not_started_with(
    agent: Agent, work: Path, staged: Packed, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "weights").write_bytes(b"one")
    sha = content_of(folder, HashCache(tmp_path / "hashes.json")).fingerprint
    arguments = {"assets": {"model": {"path": str(folder), "sha256": sha}}, **job(staged, evidence="pass")}
    agent.call("canary", **arguments)
    agent.call("launch", run="one", **arguments)
    record = json.loads((work / "runs" / "one" / "run.json").read_text())
    assert record["assets"] == arguments["assets"]
    agent.call("follow", run="one", wait=True)
    (folder / "weights").write_bytes(b"two")
    for op in ("canary", "launch"):
        with pytest.raises(AgentFailed) as caught:
            agent.call(op, run="two", **arguments)
        assert (caught.value.kind, caught.value.exit) == ("asset", 5)
        assert "'model'" in caught.value.what
    assert not (work / "runs" / "two").exists()
