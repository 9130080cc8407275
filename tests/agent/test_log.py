"""The log of a run: whole, in order, cut and capped, whoever is killed and however full the disk is."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

from tests.agent.client import Agent, Packed, alive, eventually, job

SMALL_FILES = {"grace_s": 60, "log_rotate_bytes": 20_000}


def launch(agent: Agent, release: Packed, policy: dict[str, Any] = SMALL_FILES, **act: Any) -> dict[str, Any]:
    return agent.call("launch", run="one", reason="test", policy=policy, **job(release, **act)).result


def numbers(log: str) -> list[int]:
    return [int(number) for number in re.findall(r"line (\d{7}) x{80}\n", log)]


def log_files(work: Path) -> list[Path]:
    return sorted((work / "runs/one/log").glob("*.log"))


def state(work: Path) -> dict[str, Any]:
    return json.loads((work / "runs/one/state.json").read_text())


def test_a_follower_gets_each_byte_once_across_many_files(agent: Agent, work: Path, staged: Packed) -> None:
    launch(agent, staged, lines=3000, rest="y" * 50_000 + "the end", steps=0)
    reply = agent.call("follow", run="one", wait=True)
    assert reply.result["state"] == "FAILED", "no step at all is a fault of the trivial trainer"
    files = log_files(work)
    assert len(files) > 10
    assert reply.log == "".join(path.read_text() for path in files)
    assert numbers(reply.log) == list(range(3000))
    assert "y" * 50_000 + "the end" in reply.log
    moves = [event["generation"] for event in reply.events if event["event"] == "generation"]
    assert moves == list(range(1, len(files)))
    assert all(event["skipped"] is None for event in reply.events)
    # the reason is told whole, though it may lie in two files
    assert reply.result["evidence"] == reply.log.splitlines()[-40:]
    middle = {"log": {"generation": 3, "offset": 50}}
    rest = agent.call("follow", run="one", cursors=middle)
    assert rest.log == files[3].read_text()[50:] + "".join(path.read_text() for path in files[4:])


def test_a_capped_log_is_followed_past_what_was_dropped(agent: Agent, work: Path, staged: Packed) -> None:
    launch(agent, staged, {**SMALL_FILES, "log_max_bytes": 120_000}, lines=5000)
    agent.call("follow", run="one", wait=True)
    files = log_files(work)
    assert sum(path.stat().st_size for path in files) <= 120_000
    first, gap, second = (path.read_text() for path in files[:3])
    assert numbers(first)[0] == 0
    assert "bytes of log (generations 1 to" in gap
    assert numbers(files[-1].read_text())[-1] == 4999

    fresh = agent.call("follow", run="one", wait=True)
    assert fresh.log == first + second + "".join(path.read_text() for path in files[3:])
    assert numbers(fresh.log)[-1] == 4999
    skipped = [event["skipped"] for event in fresh.events]
    following = int(files[2].stem)
    assert skipped[0] == f"the log from byte 0 of generation 1 up to generation {following} was dropped on the host"
    assert set(skipped[1:]) == {None}

    cursors = {"log": {"generation": 2, "offset": 500}}
    late = agent.call("follow", run="one", wait=True, cursors=cursors)
    assert late.log == fresh.log[len(first) :]
    assert "from byte 500 of generation 2" in late.events[0]["skipped"]
    listed = [file["path"] for file in agent.call("files", run="one").result["files"]]
    assert [path for path in listed if path.startswith("log/")] == [f"log/{path.name}" for path in files]


def test_a_killed_pump_is_replaced_and_the_job_goes_on(agent: Agent, work: Path, staged: Packed) -> None:
    pid = launch(agent, staged, forever=True)["pid"]
    eventually(lambda: "line 3\n" in agent.call("follow", run="one").log)
    killed = state(work)["pump"]
    os.kill(killed, signal.SIGKILL)
    eventually(lambda: "the writer of this log was killed" in agent.call("follow", run="one").log)
    before = agent.call("follow", run="one")
    eventually(lambda: agent.call("follow", run="one", cursors=before.result["cursors"]).log)
    assert alive(pid)
    assert agent.call("stop", run="one", grace_s=60).result["state"] == "STOPPED"
    log = agent.call("follow", run="one").log
    assert log.endswith("the last line\n")
    seen = [int(number) for number in re.findall(r"^line (\d+)$", log, re.MULTILINE)]
    assert seen == sorted(set(seen)), "in order, nothing twice"


def test_the_log_of_a_lost_run_goes_on_and_ends_with_its_processes(agent: Agent, work: Path, staged: Packed) -> None:
    pid = launch(agent, staged, forever=True)["pid"]
    eventually(lambda: state(work).get("pump") and "ready" in agent.call("follow", run="one").log)
    found = state(work)
    os.kill(found["supervisor"]["pid"], signal.SIGKILL)
    eventually(lambda: agent.call("status", run="one").result["state"] == "LOST")
    if alive(pid):
        # no systemd here, whose unit would have taken it along: it must not meet a broken pipe
        seen = agent.call("follow", run="one").result["cursors"]
        eventually(lambda: agent.call("follow", run="one", cursors=seen).log.count("\n") > 3)
        assert alive(pid)
    assert agent.call("stop", run="one", grace_s=1).result["remaining"] == []
    eventually(lambda: not alive(found["pump"]))


def test_a_full_disk_does_not_hold_the_job_up(small_disk: Path, tmp_path: Path, release: Packed) -> None:
    with Agent(small_disk) as agent:
        agent.call("stage", digest=release.digest, size=len(release.archive), upload=release.archive)
        filler = small_disk / "filler"
        # more than the pipe to the pump holds: what is still in it does not fill the disk again
        filler.write_bytes(b"f" * 1_500_000)
        launch(agent, release, {"grace_s": 60}, lines=60_000, mark=str(tmp_path / "done"), forever=True)
        # 5 MB of log went to a disk of 3 MB
        eventually((tmp_path / "done").exists)
        filler.unlink()
        eventually(
            lambda: (
                "bytes of log were lost here: No space left" in "".join(p.read_text() for p in log_files(small_disk))
            )
        )
        assert agent.call("stop", run="one", grace_s=60).result["state"] == "STOPPED"
        log = agent.call("follow", run="one").log
    lost = [int(count) for count in re.findall(r"dflash-ops: (\d+) bytes of log were lost here", log)]
    assert sum(lost) > 1_000_000
    assert log.endswith("the last line\n")
