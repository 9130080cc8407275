"""A run that hangs, or whose loss is none, is ended by its host: nobody has to look."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.agent.client import PATIENCE_S, Agent, Packed, alive, eventually, job

STEP = '{"kind": "step", "step": 7, "loss": 1.5}\n'


def launch(agent: Agent, release: Packed, policy: dict[str, Any], **act: Any) -> dict[str, Any]:
    return agent.call("launch", run="one", reason="test", policy=policy, **job(release, **act)).result


def events(work: Path) -> list[str]:
    return [json.loads(line)["event"] for line in (work / "events.ndjson").read_text().splitlines()]


def test_a_hang_is_ended_with_stacks_though_it_prints(agent: Agent, work: Path, staged: Packed) -> None:
    launch(agent, staged, {"grace_s": 60, "stall_s": 1}, records=[STEP], forever=True)
    reply = agent.call("follow", run="one", wait=True)
    status = reply.result
    assert (status["state"], status["exit"]["code"], status["exit"]["forced"]) == ("FAILED", 20, False)
    reason = status["exit"]["reason"]
    assert (reason["kind"], reason["step"]) == ("stalled", 7)
    assert reason["seconds"] >= 1
    assert "after step 7 (stall_s is 1)" in reason["what"]
    assert reply.log.index("stack of every thread\n") < reply.log.index("the last line\n")
    assert status["evidence"][-1] == "the last line"
    assert events(work) == ["stage", "launch", "stalled", "exit"]


def test_a_hang_that_does_not_even_stop_is_killed(agent: Agent, staged: Packed) -> None:
    pid = launch(agent, staged, {"grace_s": 0.5, "stall_s": 1}, records=[STEP], stubborn=True)["pid"]
    status = agent.call("follow", run="one", wait=True).result
    assert (status["state"], status["exit"]["signal"], status["exit"]["forced"]) == ("FAILED", 9, True)
    assert status["exit"]["reason"]["kind"] == "stalled"
    assert not alive(pid)


def test_a_loss_that_is_none_ends_the_run_and_no_checkpoint_is_made_of_it(
    agent: Agent, work: Path, staged: Packed
) -> None:
    bad = '{"kind": "step", "step": 8, "loss": NaN, "workers": [{"worker": 0, "samples": [4, 8]}]}\n'
    launch(agent, staged, {"grace_s": 60}, records=[STEP, bad], forever=True)
    reply = agent.call("follow", run="one", wait=True)
    status = reply.result
    assert (status["state"], status["exit"]["signal"]) == ("FAILED", int(signal.SIGKILL))
    reason = status["exit"]["reason"]
    assert (reason["kind"], reason["step"], reason["what"]) == ("non_finite", 8, "loss is NaN at step 8")
    assert reason["record"]["workers"] == [{"worker": 0, "samples": [4, 8]}]
    assert "stack of every thread" in reply.log
    assert not (work / "runs/one/out/checkpoints").exists()
    assert status["last"]["loss"] == "NaN"


def test_a_loss_that_is_none_in_the_last_step_is_no_success(agent: Agent, staged: Packed) -> None:
    launch(agent, staged, {}, records=['{"kind": "step", "step": 9, "loss": Infinity}\n'])
    status = agent.call("follow", run="one", wait=True).result
    assert (status["state"], status["exit"]["reason"]["kind"]) == ("FAILED", "non_finite")


def test_a_stop_that_was_asked_for_is_no_stall(agent: Agent, staged: Packed) -> None:
    launch(agent, staged, {"stall_s": 600}, records=[STEP], forever=True)
    eventually(lambda: "ready" in agent.call("follow", run="one").log)
    status = agent.call("stop", run="one", grace_s=60).result
    assert (status["state"], status["exit"]["reason"]) == ("STOPPED", None)


JUMPING = """
import itertools, sys, time
from pathlib import Path

jumps, real = itertools.cycle((0, 1e8, -1e8)), time.time
time.time = lambda: real() + next(jumps)
from dflash_ops.agent.runs import RunFolder
from dflash_ops.agent.supervisor import Supervisor

assert abs(time.time() - time.time()) > 1e7
Supervisor(RunFolder(Path(sys.argv[1])), "").run()
"""


def folder_of_another(agent: Agent, work: Path, release: Packed, act: dict[str, Any]) -> Path:
    """A run's folder as a launch makes it, for a supervisor that a test starts with a clock of its own."""
    launch(agent, release, {})
    agent.call("follow", run="one", wait=True)
    first = work / "runs/one"
    folder = work / "runs/two"
    for name in ("log", "out"):
        (folder / name).mkdir(parents=True)
    record = json.loads((first / "run.json").read_text().replace(str(first), str(folder)))
    record["environment"]["DFLASH_OPS_RUN"] = "two"
    record["policy"] = {**record["policy"], "grace_s": 60, "stall_s": 60, "first_step_s": 60}
    (folder / "run.json").write_text(json.dumps(record))
    settings = json.loads((first / "settings.json").read_text())
    settings["training"]["act"] = act
    (folder / "settings.json").write_text(json.dumps(settings))
    return folder


FROZEN = """
import select, sys, time
from pathlib import Path

frozen_s, look, count = [0.0], select.select, time.monotonic
time.monotonic = lambda: count() + frozen_s[0]


def frozen_meanwhile(*args):
    frozen_s[0] += 86400
    return look(*args)


from dflash_ops.agent.runs import RunFolder
from dflash_ops.agent.supervisor import Supervisor

supervisor = Supervisor(RunFolder(Path(sys.argv[1])), "")
select.select = frozen_meanwhile
supervisor.run()
"""


def test_time_in_which_the_host_was_frozen_is_no_silence(agent: Agent, work: Path, staged: Packed) -> None:
    # a container that is suspended, for a backup say: its clock goes on, nothing in it does
    folder = folder_of_another(agent, work, staged, {"steps": 5, "pause": 0.5})
    subprocess.run([sys.executable, "-c", FROZEN, str(folder)], cwd=Path(__file__).parents[2], check=True)
    ended = json.loads((folder / "exit.json").read_text())
    assert (ended["state"], ended["code"], ended["reason"]) == ("SUCCEEDED", 0, None)


@pytest.mark.parametrize("asked", [False, True])
def test_a_wall_clock_that_jumps_neither_stalls_nor_ends_a_run(
    agent: Agent, work: Path, staged: Packed, asked: bool
) -> None:
    # the supervisor's wall clock jumps by years whenever it is read
    folder = folder_of_another(agent, work, staged, {"forever": True} if asked else {"steps": 20, "pause": 0.05})
    supervisor = subprocess.Popen([sys.executable, "-c", JUMPING, str(folder)], cwd=Path(__file__).parents[2])
    if asked:
        # a launch waits for this too
        eventually((folder / "state.json").exists)
        eventually(lambda: "ready" in "".join(path.read_text() for path in (folder / "log").glob("*.log")))
        assert agent.call("stop", run="two", grace_s=60).result["state"] == "STOPPED"
    assert supervisor.wait(timeout=PATIENCE_S) == 0
    ended = json.loads((folder / "exit.json").read_text())
    expected = ("STOPPED", 20) if asked else ("SUCCEEDED", 0)
    assert (ended["state"], ended["code"], ended["reason"], ended["forced"]) == (*expected, None, False)
