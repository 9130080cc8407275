"""`notify` of a host's file: read on this machine, told from the host, shown nowhere."""

from __future__ import annotations

import threading
from pathlib import Path

from tests.agent.client import eventually
from tests.agent.test_notify import SECRET, Web
from tests.commands import Desk

HOOK = "TRAINING_WEBHOOK"


def with_webhook(desk: Desk) -> None:
    host = desk.folder / "hosts/box.yaml"
    host.write_text(host.read_text() + f"notify: {{webhook: env:{HOOK}}}\n")


def files_with_secret(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes())


def test_the_end_of_a_run_is_posted_and_its_url_comes_home_nowhere(desk: Desk) -> None:
    with_webhook(desk)
    with Web() as web:
        threading.Thread(target=web.serve_forever, daemon=True).start()
        desk.environment[HOOK] = web.url
        done = desk.deploy()
        assert done.code == 0, done.out + done.err
        eventually(lambda: web.bodies)
        web.shutdown()
    (event,) = web.events
    assert (event["event"], event["run"], event["state"]) == ("ended", done.result["run"], "SUCCEEDED")
    assert (event["playbook"], event["step"]) == ("tiny", 12)
    assert SECRET not in done.out + done.err
    assert files_with_secret(desk.folder) == ["notify.json"]
    assert files_with_secret(desk.runs) == []


def test_a_url_that_cannot_be_read_stops_the_command_before_anything_else(desk: Desk) -> None:
    with_webhook(desk)
    for value, why in ((None, "it is not set here"), (f"ftp://{SECRET}/", "it is no http or https URL")):
        if value is not None:
            desk.environment[HOOK] = value
        refused = desk.deploy()
        assert refused.code == 2
        assert why in refused.error["what"]
        assert "notify.webhook" in refused.error["what"]
        assert SECRET not in refused.out + refused.err
        assert not refused.named("built")


def test_a_command_that_is_not_there_is_refused_before_the_canary(desk: Desk) -> None:
    host = desk.folder / "hosts/box.yaml"
    without = host.read_text()
    host.write_text(without + "notify: {command: [/nowhere/page-me, --training]}\n")
    refused = desk.deploy()
    assert refused.code == 5, refused.out + refused.err
    assert refused.error["what"] == "notify: /nowhere/page-me is not there, or cannot be executed"
    assert not refused.named("verdict")
    assert not refused.named("launched")
    # found on the path of jobs
    host.write_text(without + "notify: {command: ['false']}\n")
    done = desk.deploy()
    assert done.code == 0, done.out + done.err
    run = done.result["run"]
    eventually(lambda: "nobody was told (ended): false ended with exit code 1" in desk.type("status", run).err)
    assert desk.run("collect").code == 0
    assert "nobody was told: false ended with exit code 1" in (desk.runs / run / "report.md").read_text()
