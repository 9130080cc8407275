"""`wait`: blocks until the run has ended, and ends as the run did."""

from __future__ import annotations

import signal

from tests.commands import Desk

UNPROVEN = ("--skip-canary", "--reason", "the wait is tested here")


def test_waits_for_the_end_and_says_no_more_than_that(desk: Desk) -> None:
    desk.write_playbook("slow", faults=("slow-steps",), training={"steps": 5000})
    run = desk.deploy("--detach", *UNPROVEN, playbook="slow").result["run"]
    early = desk.run("wait", "--timeout", "0.1")
    assert (early.code, early.result["run"]) == (10, run)
    assert run in early.error["what"]
    assert desk.run("status").result["state"] == "RUNNING"
    with desk.started("wait") as interrupted:
        interrupted.until_event("waiting")
        interrupted.kill(signal.SIGINT)
        assert interrupted.rest()[-1]["exit"] == 130
    with desk.started("wait") as waiting:
        assert waiting.until_event("waiting")["run"] == run
        assert desk.run("stop").result["state"] == "STOPPED"
        events = waiting.rest()
    assert [event["event"] for event in events] == ["ended", "result"]
    assert (events[-1]["exit"], events[-1]["run"], events[-1]["state"]) == (0, run, "STOPPED")
    assert desk.run("wait", run, "--timeout", "0").code == 0
