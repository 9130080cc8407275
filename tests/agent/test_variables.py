"""A job gets the variables and the secrets of its host's file; the secrets lie in nothing that is kept or sent."""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from dflash_ops.agent.files import write_json
from dflash_ops.agent.processes import ProcessId, boot_id
from tests.agent.client import Agent, AgentFailed, Packed, eventually, job

SECRET = "hf_0123456789/abcdef"


def variables(**act: Any) -> dict[str, Any]:
    return {"environment": {"NCCL_DEBUG": "INFO"}, "secrets": {"SECRET": SECRET}, **act}


def files_with(folder: Path, text: str) -> list[str]:
    """Files that a supervisor makes and renames meanwhile may go away under our eyes."""
    files = [Path(parent, name) for parent, _, names in os.walk(folder) for name in names]
    found = []
    for path in files:
        with contextlib.suppress(FileNotFoundError):
            if path.is_file() and text.encode() in path.read_bytes():
                found.append(str(path.relative_to(folder)))
    return found


def test_a_verb_gets_them_and_shows_no_secret(agent: Agent, staged: Packed) -> None:
    reply = agent.call("check", **variables(), **job(staged, tell="SECRET"))
    assert reply.result["environment"]["SECRET"] == "***"
    assert "told *** and ***\n" in reply.log
    assert "told INFO and INFO\n" in agent.call("check", **variables(), **job(staged, tell="NCCL_DEBUG")).log


def test_the_evidence_of_a_failed_canary_is_masked(agent: Agent, work: Path, staged: Packed) -> None:
    verdict = agent.call("canary", **variables(), **job(staged, tell="SECRET", exit=3)).result["verdict"]
    assert "told *** and ***" in verdict["evidence"]["log_tail"]
    assert verdict["binding"]["variables"] == {"NCCL_DEBUG": "INFO", "SECRET": None}
    assert files_with(work, SECRET) == []


def test_a_run_gets_them_and_leaves_no_secret_behind(agent: Agent, work: Path, staged: Packed) -> None:
    arguments = {**variables(), **job(staged, evidence="pass", tell="SECRET", forever=True)}
    agent.call("canary", **arguments)
    agent.call("launch", run="r", **arguments)
    log = work / "runs" / "r" / "log" / "000000.log"
    eventually(lambda: "ready" in log.read_text())
    assert "told *** and ***\n" in log.read_text()
    # while it runs, and after it: the supervisor alone knows
    assert files_with(work, SECRET) == []
    agent.call("stop", run="r", grace_s=60)
    assert files_with(work, SECRET) == []
    assert log.read_text().endswith("the last line\n")
    record = json.loads((work / "runs" / "r" / "run.json").read_text())
    assert record["secrets"] == ["SECRET"]
    assert record["environment"]["NCCL_DEBUG"] == "INFO"
    assert "SECRET" not in record["environment"]


def test_what_a_dying_run_says_last_is_in_its_log(agent: Agent, work: Path, staged: Packed) -> None:
    arguments = {**variables(), **job(staged, evidence="pass", steps=300)}
    agent.call("canary", **arguments)
    agent.call("launch", run="r", **arguments)
    reply = agent.call("follow", run="r", wait=True)
    assert reply.result["state"] == "SUCCEEDED"
    assert [line for line in reply.log.splitlines() if line.startswith("step")] == [f"step {n}" for n in range(300)]


def test_a_verdict_speaks_for_the_plain_values_and_the_names_of_secrets(agent: Agent, staged: Packed) -> None:
    same = job(staged, evidence="pass")
    agent.call("canary", **variables(), **same)
    assert agent.call("verdict", **variables(), **same).result["holds"]
    renewed = {"environment": {"NCCL_DEBUG": "INFO"}, "secrets": {"SECRET": "another value"}}
    assert agent.call("verdict", **renewed, **same).result["holds"]
    for other in ({}, {**variables(), "environment": {"NCCL_DEBUG": "WARN"}}, {"environment": {"NCCL_DEBUG": "INFO"}}):
        answer = agent.call("verdict", **other, **same).result
        assert not answer["holds"]
        assert "other environment variables" in answer["why"]


@pytest.mark.parametrize(
    "given",
    [
        {"environment": {"CUDA_VISIBLE_DEVICES": ""}},
        {"environment": {"DFLASH_OPS_RUN": "x"}},
        {"environment": {"A B": "x"}},
        {"environment": {"A": "x\0"}},
        {"environment": {"A": 1}},
        {"secrets": {"PATH": SECRET}},
        {"secrets": {"A": "short"}},
        {"secrets": {"A": f"{SECRET}\n"}},
        {"environment": {"A": "x"}, "secrets": {"A": SECRET}},
    ],
)
def test_what_cannot_be_a_variable_is_refused_without_its_value(
    shared: Agent, release: Packed, given: dict[str, Any]
) -> None:
    with pytest.raises(AgentFailed) as caught:
        shared.call("check", **given, **job(release))
    assert (caught.value.kind, caught.value.exit) == ("request", 2)
    assert SECRET not in json.dumps(caught.value.error)


def test_secrets_of_a_launch_that_was_killed_are_cleared_away(agent: Agent, work: Path) -> None:
    """What an agent that was killed between two steps of a launch leaves, and what a living one has just written."""
    me = ProcessId.of(os.getpid())
    for name, keeper in (("dead", ProcessId(me.pid, me.start - 1)), ("alive", me)):
        folder = work / "runs" / name
        folder.mkdir(parents=True)
        write_json(folder / "state.json", {"boot_id": boot_id(), "supervisor": keeper.to_json(), "time": time.time()})
        write_json(folder / "secrets.json", {"SECRET": SECRET})
    agent.call("lock", owner="me@here", command="deploy")
    assert files_with(work, SECRET) == ["runs/alive/secrets.json"]
    assert (work / "runs/alive/secrets.json").stat().st_mode & 0o777 == 0o600
