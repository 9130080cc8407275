"""A deploy in this process, in which something happens at one of its events: the same moment, every time."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash_ops.config import load_host, load_playbook
from dflash_ops.deploy.deploying import Choices, Outcome, deploy
from dflash_ops.deploy.events import Events
from dflash_ops.deploy.session import Session
from dflash_ops.errors import OpsError
from tests.commands import Desk


def sit_down(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on this process is a command of the desk."""
    monkeypatch.chdir(desk.folder)
    monkeypatch.setenv("HOME", desk.env()["HOME"])
    for name in ("XDG_STATE_HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)


def failed_deploy(event: str, then: Callable[[], None]) -> tuple[OpsError, Outcome]:
    """How a deploy fails that has `then` done to it at that event."""

    def view(seen: dict[str, Any]) -> None:
        if seen["event"] == event:
            then()

    events, outcome = Events(view), Outcome()
    host, _ = load_host("box", None, env=os.environ, last_host=None)
    with pytest.raises(OpsError) as caught, Session(host, events) as session:
        deploy(session, load_playbook("tiny"), events, Choices(runs=Path("runs"), detach=True), outcome)
    return caught.value, outcome
