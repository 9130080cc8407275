"""`tail-logs`: every line once, whenever it is started."""

from __future__ import annotations

import signal
import subprocess

from tests.commands import Desk


def whole_log(desk: Desk, run: str) -> list[str]:
    desk.run("collect", run)
    return (desk.runs / run / "log" / "000000.log").read_text().splitlines()


def test_before_during_and_after(desk: Desk) -> None:
    desk.write_playbook("slow", faults=("slow-steps",), training={"steps": 20})
    with desk.started("tail-logs", "-f") as before:
        assert "waiting" in before.until_event("notice")["text"]
        run = desk.deploy("--detach", playbook="slow").result["run"]
        during = desk.run("tail-logs", "-f")
        seen_before = [event["line"] for event in before.rest() if event["event"] == "log"]
    after = desk.run("tail-logs", "-f", run)
    log = whole_log(desk, run)
    assert len(log) > 10
    assert during.log == log
    assert after.log == log
    assert seen_before == log
    assert desk.run("tail-logs", run).log == log
    assert desk.run("tail-logs", run, "-n", "3").log == log[-3:]


def test_a_kill_is_an_interrupt_with_its_result(desk: Desk) -> None:
    with desk.started("tail-logs", "-f") as waiting:
        waiting.until_event("notice")
        waiting.kill(signal.SIGTERM)
        last = waiting.rest()[-1]
        assert (last["event"], last["exit"], waiting.code) == ("result", 130, 130)


def test_prints_the_log_and_nothing_else_on_standard_output(desk: Desk) -> None:
    run = desk.deploy().result["run"]
    shown = desk.type("tail-logs", "--host", "box")
    assert shown.out.splitlines() == whole_log(desk, run)
    assert run in shown.err


def test_a_closed_pipe_is_no_traceback(desk: Desk) -> None:
    desk.deploy()
    words = " ".join(desk.argv("tail-logs", "--host", "box"))
    done = subprocess.run(
        ["sh", "-c", f"{words} | head -n 1"],
        cwd=desk.folder,
        env=desk.env(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert len(done.stdout.splitlines()) == 1
    assert "Traceback" not in done.stderr


def test_without_a_run(desk: Desk) -> None:
    done = desk.run("tail-logs")
    assert done.code == 2
    assert "no run" in done.error["what"]
    unknown = desk.run("tail-logs", "20200101-000000-nope-0000")
    assert unknown.code == 2
    assert "20200101-000000-nope-0000" in unknown.error["what"]
