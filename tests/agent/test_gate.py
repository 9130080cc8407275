"""The canary's verdict: decided by the contract, bound to what the agent sees, and the only way to a run."""

from __future__ import annotations

import json
import os
import signal
import sys
import venv
from pathlib import Path
from typing import Any

import pytest

from tests.agent.client import Agent, AgentFailed, Packed, bare_python, job, trainer_release


def verdict_of(agent: Agent, release: Packed, **act: Any) -> dict[str, Any]:
    return agent.call("canary", timeout_s=60, **job(release, **act)).result["verdict"]


def refused(agent: Agent, arguments: dict[str, Any]) -> AgentFailed:
    with pytest.raises(AgentFailed) as caught:
        agent.call("launch", run="never", **arguments)
    assert caught.value.kind == "gate"
    assert agent.call("runs").result == {"runs": []}
    return caught.value


@pytest.mark.parametrize(
    ("act", "outcome", "says"),
    [
        ({"evidence": "pass", "exit": 0}, "pass", "as told"),
        ({"evidence": "fail", "exit": 6}, "fail", "as told"),
        ({"evidence": "inconclusive", "exit": 7}, "inconclusive", "as told"),
        ({"evidence": "pass", "exit": 6}, "fail", "exit code 6 and left evidence that says 'pass'"),
        ({"evidence": "fail", "exit": 0}, "inconclusive", "exit code 0 and left evidence that says 'fail'"),
        ({"evidence": "splendid", "exit": 0}, "inconclusive", "without a valid outcome"),
        ({"exit": 0}, "inconclusive", "left no evidence"),
        ({"exit": 7}, "inconclusive", "left no evidence"),
        ({"exit": 6}, "fail", "left no evidence"),
        ({"exit": 1}, "fail", "exit code 1"),
        ({"evidence": "pass", "signal": int(signal.SIGSEGV)}, "fail", "SIGSEGV"),
        ({"evidence": "pass", "signal": int(signal.SIGKILL)}, "inconclusive", "SIGKILL"),
        ({"signal": int(signal.SIGTERM)}, "inconclusive", "SIGTERM"),
        ({"signal": int(signal.SIGHUP)}, "inconclusive", "SIGHUP"),
    ],
)
def test_evidence_and_exit_agree_or_the_death_decides(
    shared: Agent, release: Packed, act: dict[str, Any], outcome: str, says: str
) -> None:
    shared.call("stage", digest=release.digest, size=len(release.archive), upload=release.archive)
    verdict = verdict_of(shared, release, **act)
    assert verdict["outcome"] == outcome
    assert says in verdict["evidence"]["summary"]
    if says != "as told":
        assert verdict["evidence"]["log_tail"][-1].startswith("canary of None")
    answer = shared.call("verdict", **job(release)).result
    assert answer["holds"] == (outcome == "pass")


@pytest.mark.parametrize(("second", "code"), [("pass", 0), ("fail", 6), ("inconclusive", 7)])
def test_a_canary_whose_process_broke_runs_once_more_and_that_one_decides(
    agent: Agent, work: Path, staged: Packed, second: str, code: int
) -> None:
    reply = agent.call("canary", timeout_s=60, **job(staged, broken=1, evidence=second, exit=code))
    verdict = reply.result["verdict"]
    assert [event["why"] for event in reply.events if event["event"] == "again"] == ["it broke"]
    assert (verdict["outcome"], verdict["evidence"]["summary"]) == (second, "as told")
    folder = (work / verdict["log"]).parent
    assert json.loads((folder / "evidence.first.json").read_text())["again"] == "it broke"
    logs = [(folder / name).read_text() for name in ("log.first", "log")]
    assert [log.count("canary of None") for log in logs] == [1, 1]
    events = [json.loads(line) for line in (work / "events.ndjson").read_text().splitlines()]
    assert [each["why"] for each in events if each["event"] == "canary_again"] == ["it broke"]


def test_a_canary_whose_process_crashed_in_a_control_runs_once_more(agent: Agent, staged: Packed) -> None:
    verdict = verdict_of(agent, staged, broken=1, crash=int(signal.SIGSEGV), evidence="pass")
    assert verdict["outcome"] == "pass"
    verdict = verdict_of(agent, staged, broken=9, crash=int(signal.SIGSEGV), evidence="pass")
    assert verdict["outcome"] == "fail"


def test_a_canary_whose_process_breaks_twice_is_inconclusive(agent: Agent, work: Path, staged: Packed) -> None:
    verdict = verdict_of(agent, staged, broken=9, evidence="pass")
    assert (verdict["outcome"], verdict["evidence"]["summary"]) == ("inconclusive", "a control broke")
    assert (work / "cache" / "canaries").read_text() == "2"


@pytest.mark.parametrize(
    ("told", "code"),
    [({"outcome": "fail"}, 6), ({"outcome": "pass"}, 7), ({"again": ""}, 7), ({"again": 1}, 7), ({}, 6)],
)
def test_no_other_canary_runs_twice(
    agent: Agent, work: Path, staged: Packed, told: dict[str, object], code: int
) -> None:
    verdict = verdict_of(agent, staged, broken=1, told=told, code=code, evidence="pass")
    assert verdict["outcome"] != "pass"
    assert (work / "cache" / "canaries").read_text() == "1"


def test_a_canary_over_its_deadline_is_inconclusive_and_shows_its_stacks(agent: Agent, staged: Packed) -> None:
    # time enough for its Python to start
    reply = agent.call("canary", timeout_s=4, **job(staged, hang=True, evidence="pass"))
    verdict = reply.result["verdict"]
    assert verdict["outcome"] == "inconclusive"
    assert "deadline" in verdict["evidence"]["summary"]
    assert any("stack of every thread" in line for line in verdict["evidence"]["log_tail"])


def test_a_verdict_says_what_it_is_bound_to(agent: Agent, work: Path, staged: Packed) -> None:
    verdict = verdict_of(agent, staged, evidence="pass")
    facts = agent.call("facts").result
    probe = agent.call("probe", python=bare_python()).result
    binding = verdict["binding"]
    assert binding["release"] == staged.digest
    assert binding["environment"] == probe["digest"]
    assert binding["boot_id"] == facts["boot_id"]
    assert binding["devices"] == (sorted(gpu["uuid"] for gpu in facts["gpus"]) or ["cpu"])
    assert verdict["boottime_s"] == pytest.approx(facts["boottime_s"], abs=60)
    assert json.loads((work / "verdicts" / f"{verdict['digest']}.json").read_text()) == verdict
    assert (work / verdict["log"]).read_text().startswith("stdin 0 bytes\ncanary of None")


def test_a_pass_opens_the_gate_and_goes_with_the_run(agent: Agent, work: Path, staged: Packed) -> None:
    verdict = verdict_of(agent, staged, evidence="pass")
    # the training settings are no part of it
    agent.call("launch", run="first", **job(staged, steps=1))
    assert json.loads((work / "runs" / "first" / "verdict.json").read_text()) == verdict
    ended = agent.call("follow", run="first", wait=True).result
    assert (ended["state"], ended["skipped_canary"]) == ("SUCCEEDED", None)


def test_no_verdict_no_run(agent: Agent, staged: Packed) -> None:
    error = refused(agent, job(staged))
    assert error.exit == 7
    assert "no canary has passed" in error.what


def test_a_failed_canary_is_exit_6_with_its_evidence(agent: Agent, staged: Packed) -> None:
    verdict_of(agent, staged, evidence="fail", exit=6)
    error = refused(agent, job(staged))
    assert error.exit == 6
    assert error.error["evidence"]["evidence"]["summary"] == "as told"


def test_an_inconclusive_canary_is_exit_7(agent: Agent, staged: Packed) -> None:
    verdict_of(agent, staged, evidence="inconclusive", exit=7)
    assert refused(agent, job(staged)).exit == 7


def test_another_workload_is_refused_in_words(agent: Agent, staged: Packed) -> None:
    verdict_of(agent, staged, evidence="pass")
    other = job(staged)
    other["settings"]["workload"]["threads"] = 4
    error = refused(agent, other)
    assert error.exit == 7
    assert "another workload" in error.what
    assert "release" not in error.what.split("nearest")[1]


def test_another_release_is_refused_in_words(agent: Agent, staged: Packed) -> None:
    verdict_of(agent, staged, evidence="pass")
    other = trainer_release(**{"more.py": "x = 1\n"})
    agent.call("stage", digest=other.digest, size=len(other.archive), upload=other.archive)
    assert "another release" in refused(agent, job(other)).what


def test_another_python_is_refused_in_words(agent: Agent, staged: Packed) -> None:
    verdict_of(agent, staged, evidence="pass")
    # the one of the tests, with all its packages
    other = job(staged, python=sys.executable)
    assert "another python or other packages" in refused(agent, other).what


def test_a_package_that_changed_is_noticed(agent: Agent, staged: Packed, tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv" / "bin" / "python"
    arguments = job(staged, python=str(python), evidence="pass")
    assert agent.call("canary", **arguments).result["verdict"]["outcome"] == "pass"
    assert agent.call("verdict", **arguments).result["holds"]
    (site,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    (site / "thing-1.0.dist-info").mkdir()
    (site / "thing-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: thing\nVersion: 1.0\n")
    assert "another python or other packages" in refused(agent, arguments).what


def test_an_old_verdict_is_refused_with_its_age(agent: Agent, work: Path, staged: Packed) -> None:
    verdict = verdict_of(agent, staged, evidence="pass")
    path = work / "verdicts" / f"{verdict['digest']}.json"
    path.write_text(json.dumps({**verdict, "boottime_s": verdict["boottime_s"] - 90_000}))
    error = refused(agent, job(staged))
    assert error.exit == 7
    assert "passed 25 hours ago, which is over the limit of 24 hours" in error.what
    path.write_text(json.dumps({**verdict, "boottime_s": verdict["boottime_s"] + 1e6}))
    refused(agent, job(staged))
    path.write_text(json.dumps(verdict))
    refused(agent, {**job(staged), "max_age_s": 0})
    assert agent.call("verdict", max_age_s=3600, **job(staged)).result["holds"]


def test_a_verdict_of_an_earlier_boot_or_a_forged_one_does_not_count(agent: Agent, work: Path, staged: Packed) -> None:
    verdict = verdict_of(agent, staged, evidence="fail", exit=6)
    path = work / "verdicts" / f"{verdict['digest']}.json"
    other_boot = {**verdict["binding"], "boot_id": "before"}
    path.write_text(json.dumps({**verdict, "outcome": "pass", "binding": other_boot}))
    assert refused(agent, job(staged)).exit == 7
    path.write_text("{")
    assert refused(agent, job(staged)).exit == 7


@pytest.mark.parametrize("how", ["edited", "added", "removed", "executable", "linked", "folder"])
def test_a_tampered_release_never_starts(agent: Agent, work: Path, staged: Packed, how: str) -> None:
    verdict_of(agent, staged, evidence="pass")
    root = work / "releases" / staged.digest
    file = root / "tt" / "__init__.py"
    for path in (root, root / "tt"):
        path.chmod(0o755)
    file.chmod(0o755 if how == "executable" else 0o644)
    if how == "edited":
        file.write_text("import evil\n")
    elif how == "added":
        (root / "tt" / "sitecustomize.py").touch()
    elif how == "removed":
        file.unlink()
    elif how == "linked":
        file.unlink()
        file.symlink_to("/dev/null")
    elif how == "folder":
        (root / "json").mkdir()
    error = refused(agent, job(staged))
    assert error.exit == 7
    assert "is not what was staged" in error.what
    # no reason opens the gate for a release that is not what its name says
    assert "is not what was staged" in refused(agent, {**job(staged), "reason": "in a hurry"}).what


def test_a_release_that_changes_under_the_canary_is_inconclusive(agent: Agent, work: Path, staged: Packed) -> None:
    edit = str(work / "releases" / staged.digest / "tt" / "__init__.py")
    verdict = verdict_of(agent, staged, evidence="pass", edit=edit)
    assert verdict["outcome"] == "inconclusive"
    assert "changed" in verdict["evidence"]["summary"]
    assert verdict["evidence"]["outcome"] == "inconclusive"


def test_a_new_canary_that_does_not_end_takes_the_old_pass_away(work: Path, release: Packed) -> None:
    with Agent(work) as agent:
        agent.call("stage", digest=release.digest, size=len(release.archive), upload=release.archive)
        verdict_of(agent, release, evidence="pass")
        agent.ask("canary", timeout_s=60, **job(release, hang=True))
        while agent.frame()[0] != b"D":
            pass
    with Agent(work) as agent:
        assert agent.call("verdict", **job(release)).result["holds"] is False


def test_skipping_takes_a_reason_and_stays_with_the_run(agent: Agent, work: Path, staged: Packed) -> None:
    with pytest.raises(AgentFailed) as caught:
        agent.call("launch", run="hasty", reason="", **job(staged))
    assert caught.value.kind == "request"
    agent.call("launch", run="hasty", reason="canary box is down", **job(staged))
    ended = agent.call("follow", run="hasty", wait=True).result
    assert ended["skipped_canary"] == "canary box is down"
    assert agent.call("runs").result["runs"][0]["skipped_canary"] == "canary box is down"
    assert json.loads((work / "runs/hasty/run.json").read_text())["skipped_canary"] == "canary box is down"
    assert not (work / "runs/hasty/verdict.json").exists()


def test_canaries_do_not_pile_up(agent: Agent, work: Path, staged: Packed) -> None:
    for day in range(10, 19):
        folder = work / "canary" / f"202001{day}-000000-abcd"
        folder.mkdir()
        os.utime(folder, (day, day))
    verdict = verdict_of(agent, staged, evidence="pass")
    folders = sorted(path.name[:8] for path in (work / "canary").iterdir())
    assert folders[:4] == ["20200115", "20200116", "20200117", "20200118"]
    assert len(folders) == 5
    assert (work / verdict["log"]).exists()
    kept = (work / verdict["log"]).parent.iterdir()
    assert sorted(path.name for path in kept) == ["evidence.json", "log", "settings.json"]
