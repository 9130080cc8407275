"""A playbook that names its packages: made on the host once, told everywhere, and the trainer runs in them."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.commands import Desk, eventually
from tests.wheels import locked, make_wheel, serving


@pytest.fixture
def lock(desk: Desk) -> Path:
    """Beside the playbook, with its wheels in a folder there."""
    folder = desk.folder / "playbooks"
    wheel = make_wheel(folder / "wheels", "tiny_one")
    (folder / "lock.txt").write_text(locked(wheel))
    return folder / "lock.txt"


def write_playbook(desk: Desk, **environment: Any) -> None:
    path = desk.folder / "playbooks" / "tiny.yaml"
    path.write_text(json.dumps({**json.loads(path.read_text()), "environment": {"lock": "lock.txt", **environment}}))


def said(events: list[dict[str, Any]]) -> str:
    return "\n".join(str(event["what"]) for event in events)


def test_a_deploy_in_an_environment_of_its_own(desk: Desk, lock: Path) -> None:
    write_playbook(desk, wheels={"upload": "wheels"})
    asked = desk.run("doctor", "--playbook", "tiny")
    assert asked.code == 0, asked.out
    assert f"(1 package of {lock}) is not there yet: the next deploy makes it" in said(asked.named("diagnosis"))
    assert "asset wheels: " in said(asked.named("diagnosis"))
    assert list((desk.folder / "work" / "envs").iterdir()) == []

    first = desk.deploy()
    assert first.code == 0, first.out + first.err
    (made,) = first.named("environment")
    digest = made["environment"]
    assert (made["reused"], made["python"]) == (False, str(desk.folder / "work" / "envs" / digest / "bin" / "python"))
    assert [event["begun"] for event in first.named("building")] == [True]
    assert "Successfully installed tiny_one-1.0" in [
        event["line"] for event in first.named("log") if event["source"] == "environment"
    ]
    assert f"environment {digest[:12]}" in said(first.named("diagnosis"))
    assert first.named("verdict")[0]["binding"]["environment"] == digest
    folder = Path(first.result["folder"])
    record = json.loads((folder / "run.json").read_text())
    assert (record["managed"], record["python"], record["packages"]) == (digest, made["python"], {"tiny-one": "1.0"})
    assert f"- environment: managed, {digest}" in (folder / "report.md").read_text()
    assert f"environment {digest[:12]}" in desk.type("status", "--host", "box").err

    # once it is there, nothing that it was made of is needed
    for wheel in (lock.parent / "wheels").iterdir():
        wheel.unlink()
    resumed = desk.run("resume", "--set", "steps=16")
    assert resumed.code == 0, resumed.out
    assert resumed.named("verdict")[0]["reused"]
    assert json.loads((Path(resumed.result["folder"]) / "run.json").read_text())["managed"] == digest
    second = desk.run("canary", "--playbook", "tiny")
    assert second.code == 0, second.out + second.err
    assert second.named("sent") == second.named("building") == []
    assert second.named("environment")[0]["reused"]
    assert second.named("verdict")[0]["reused"]


def test_a_deploy_whose_link_breaks_goes_on_with_the_same_build(desk: Desk, lock: Path) -> None:
    with serving(lock.parent / "wheels") as index:
        host = desk.folder / "hosts" / "box.yaml"
        host.write_text(f"{host.read_text()}environment: {json.dumps(index.arguments['environment'])}\n")
        write_playbook(desk)
        with desk.started("canary", "--playbook", "tiny") as command:
            assert command.until_event("building")["begun"]
            eventually(lambda: bool(index.asked))
            owner = json.loads((desk.folder / "work" / "lock" / "owner.json").read_text())
            os.kill(owner["agent"]["pid"], signal.SIGKILL)
            again = command.until_event("building")
            assert not again["begun"]
            index.gate.set()
            events = command.rest()
            assert command.code == 0, events
    assert index.asked == ["tiny_one-1.0-py3-none-any.whl"]
    (verdict,) = [event for event in events if event["event"] == "verdict"]
    assert verdict["binding"]["environment"] == again["environment"]
    # where packages are found is no variable of the trainer's
    assert verdict["binding"]["variables"] == {}


def test_one_that_cannot_be_made_stops_a_deploy_before_anything_runs(desk: Desk, lock: Path) -> None:
    """And the doctor says so before."""
    write_playbook(desk, wheels={"path": str(desk.folder / "nowhere")})
    asked = desk.run("doctor", "--playbook", "tiny")
    assert (asked.code, asked.result["blockers"]) == (5, 1)
    assert "there is no wheel folder" in asked.error["what"]
    done = desk.deploy()
    assert (done.code, done.error["kind"]) == (5, "environment")
    assert "there is no wheel folder" in done.error["what"]
    assert done.named("canary") == done.named("record") == []
