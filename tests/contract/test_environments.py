"""A managed environment over each way to a host: its wheels come from here, and it is made there."""

from __future__ import annotations

import json
from pathlib import Path

from tests.commands import Desk
from tests.wheels import locked, make_wheel


def test_wheels_are_brought_and_the_trainer_runs_in_what_they_make(desk: Desk) -> None:
    folder = desk.folder / "playbooks"
    (folder / "lock.txt").write_text(locked(make_wheel(folder / "wheels", "tiny_one")))
    playbook = folder / "tiny.yaml"
    section = {"lock": "lock.txt", "wheels": {"upload": "wheels"}}
    playbook.write_text(json.dumps({**json.loads(playbook.read_text()), "environment": section}))
    done = desk.run("canary", "--playbook", "tiny")
    assert done.code == 0, done.out + done.err
    assert [event["asset"] for event in done.named("sent")] == ["wheels"]
    (made,) = done.named("environment")
    (verdict,) = done.named("verdict")
    assert (verdict["outcome"], verdict["binding"]["environment"]) == ("pass", made["environment"])
    assert Path(made["python"]).parts[-4:] == ("envs", made["environment"], "bin", "python")
