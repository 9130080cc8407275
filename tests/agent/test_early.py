"""What is begun before its turn, and what is still looked at again."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from dflash_ops.agent.frames import JSON, encode_frame
from dflash_ops.agent.server import OPERATIONS
from tests.agent.client import Agent, AgentFailed, Packed, bare_python, eventually, job, trainer_release


def wrapped(folder: Path, python: str) -> tuple[str, Path]:
    """A Python that notes each of its starts in a file."""
    path, starts = folder / "python3", folder / "starts"
    path.write_text(f'#!/bin/sh\necho "$*" >> {starts}\nexec {python} "$@"\n')
    path.chmod(0o755)
    return str(path), starts


def test_a_probe_sent_ahead_begins_while_an_upload_is_awaited_and_is_answered_in_its_turn(
    agent: Agent, release: Packed, tmp_path: Path
) -> None:
    python, starts = wrapped(tmp_path, sys.executable)
    stage = agent.ask("stage", digest=release.digest, size=len(release.archive))
    probe = agent.ask("probe", python=python, after=stage)
    # nothing was uploaded yet, so `stage` is not over
    eventually(starts.exists)
    assert agent.reply(stage, release.archive).result["digest"] == release.digest
    assert agent.reply(probe).result["version"] == sys.version.split()[0]


def test_a_check_begins_before_its_turn_and_its_words_wait_for_it(agent: Agent, staged: Packed, tmp_path: Path) -> None:
    python, starts = wrapped(tmp_path, bare_python())
    other = trainer_release(**{"more.py": "x = 1\n"})
    stage = agent.ask("stage", digest=other.digest, size=len(other.archive))
    asked = job(staged, python=python)
    syntax = agent.ask("syntax", digest=staged.digest, python=python, after=stage)
    check = agent.ask("check", **asked, after=syntax)
    eventually(lambda: starts.exists() and " check " in starts.read_text())
    # nothing was uploaded yet, so `stage` is not over
    assert agent.reply(stage, other.archive).streams[0] == b""
    assert agent.reply(syntax).result["files"] > 0
    answer = agent.reply(check)
    assert answer.result["outcome"] == "ok"
    assert b"check of None in" in answer.streams[0]
    assert starts.read_text().count(" check ") == 1


def test_a_release_that_is_staged_anew_meanwhile_is_looked_at_again(agent: Agent, work: Path, staged: Packed) -> None:
    folder = work / "releases" / staged.digest
    package = folder / "tt"
    package.chmod(0o755)
    (package / "__init__.py").chmod(0o644)
    (package / "__init__.py").write_text("damaged(")
    python = bare_python()
    with pytest.raises(AgentFailed) as damaged:
        agent.call("syntax", digest=staged.digest, python=python)
    assert damaged.value.kind == "syntax"
    stage = agent.ask("stage", digest=staged.digest, size=len(staged.archive))
    syntax = agent.ask("syntax", digest=staged.digest, python=python, after=stage)
    check = agent.ask("check", **job(staged), after=syntax)
    assert agent.reply(stage, staged.archive).result["sent"]
    assert agent.reply(syntax).result["files"] > 0
    assert agent.reply(check).result["outcome"] == "ok"


def test_a_probe_after_what_failed_is_skipped(agent: Agent, tmp_path: Path) -> None:
    python, _ = wrapped(tmp_path, sys.executable)
    failing = agent.ask("activate", digest="0" * 64)
    probe = agent.ask("probe", python=python, after=failing)
    for number, kind in ((failing, "unknown_release"), (probe, "skipped")):
        with pytest.raises(AgentFailed) as failed:
            agent.reply(number)
        assert failed.value.kind == kind


def test_what_cannot_be_read_stops_no_reading(agent: Agent) -> None:
    for payload in (b"[" * 200_000, b"\xff", b'{"op": "probe", "id": 1, "python": ["x"]}', b'"probe"'):
        agent.send(encode_frame(JSON, payload))
        kind, answer, _ = agent.frame()
        assert (kind, json.loads(answer)["ok"]) == (JSON, False)
    assert agent.call("runs").result == {"runs": []}


def test_the_gate_looks_at_packages_again_that_a_probe_has_seen(agent: Agent, staged: Packed, tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    python, starts = wrapped(tmp_path, f"env PYTHONPATH={site} {bare_python()}")
    wanted = job(staged, python=python, evidence="pass")
    assert agent.call("canary", **wanted).result["verdict"]["outcome"] == "pass"
    agent.call("probe", python=python)
    before = starts.read_text().count("dist-info")
    assert before
    assert agent.call("verdict", **wanted).result["holds"]
    assert starts.read_text().count("dist-info") == before, "what was seen seconds ago is asked again"
    (site / "thing-1.0.dist-info").mkdir()
    (site / "thing-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: thing\nVersion: 1.0\n")
    with pytest.raises(AgentFailed) as failed:
        agent.call("launch", **wanted, run="one", reason=None)
    assert failed.value.kind == "gate"
    assert "other packages" in failed.value.what


def test_every_operation_that_is_offered_is_there(shared: Agent) -> None:
    for name in OPERATIONS:
        if name == "wait":
            # without arguments it waits
            continue
        try:
            shared.call(name)
        except AgentFailed as failed:
            assert failed.kind != "internal", (name, failed.error)
