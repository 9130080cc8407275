"""Work over a link that breaks: with the real agent as a child, whose process is killed where a cable would be cut."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dflash_ops.config import Host
from dflash_ops.deploy import reconnect
from dflash_ops.deploy.events import Event, Events
from dflash_ops.deploy.reconnect import conversing, reconnecting
from dflash_ops.deploy.session import Session, owner
from dflash_ops.errors import OpsError, TransportError
from dflash_ops.transport import Conversation


class Box:
    """A session with this machine, the events it told, and the waits between tries (which pass at once)."""

    def __init__(self, folder: Path) -> None:
        self.told: list[Event] = []
        self.waits: list[float] = []
        self.now = 0.0
        host = Host(name="box", transport="local", python=sys.executable, workdir=str(folder))
        self.session = Session(host, Events(self.told.append))

    def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.now += seconds


@pytest.fixture
def box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Box]:
    box = Box(tmp_path / "work")
    monkeypatch.setattr(reconnect, "sleep", box.sleep)
    monkeypatch.setattr(reconnect, "monotonic", lambda: box.now)
    with box.session:
        yield box


def cut(conversation: Conversation) -> None:
    """Kills the agent, which has spoken, and waits for the conversation to notice."""
    conversation.request("runs")
    os.kill(agent_pid(conversation), signal.SIGKILL)
    conversation.request("runs")


def agent_pid(conversation: Conversation) -> int:
    pid: int = conversation._channel._process.pid  # type: ignore[attr-defined]
    return pid


def test_work_is_begun_again_in_a_new_conversation_until_it_ends(box: Box) -> None:
    agents: list[int] = []

    def work(conversation: Conversation) -> Any:
        agents.append(agent_pid(conversation))
        if len(agents) < 3:
            cut(conversation)
        return conversation.request("runs")

    assert reconnecting(box.session, work, then="the run goes on") == {"runs": []}
    assert len(set(agents)) == 3
    assert box.waits == [1, 2]
    assert [(event["event"], event["again_in_s"], event["then"]) for event in box.told] == [
        ("link_lost", 1, "the run goes on"),
        ("link_lost", 2, "the run goes on"),
    ]


def test_it_gives_up_when_nothing_moves(box: Box) -> None:
    with pytest.raises(TransportError) as given_up:
        reconnecting(box.session, cut, then="it goes on", give_up_s=40)
    assert given_up.value.lost
    assert box.waits == [1, 2, 4, 8, 15, 30]


def test_a_refusal_of_the_host_is_not_tried_again(box: Box) -> None:
    with pytest.raises(OpsError) as refused:
        reconnecting(box.session, lambda talk: talk.request("status", {"run": "nobody"}), then="it goes on")
    assert refused.value.kind == "unknown_run"
    assert box.told == []


def test_a_host_that_was_never_reached_is_told_at_once(tmp_path: Path) -> None:
    told: list[Event] = []
    host = Host.model_validate(
        {"name": "far", "transport": "ssh", "ssh": {"address": "127.0.0.1", "port": 1, "user": "nobody"}}
    )
    with Session(host, Events(told.append)) as session, pytest.raises(TransportError) as failed:
        reconnecting(session, lambda talk: talk.request("runs"), then="it goes on")
    assert failed.value.kind == "unreachable"
    assert told == []


def test_what_is_done_after_the_beginning_is_never_done_twice(box: Box) -> None:
    begun: list[int] = []
    with (
        pytest.raises(TransportError),
        conversing(box.session, lambda talk: begun.append(agent_pid(talk)), then="it goes on") as (conversation, _),
    ):
        cut(conversation)
    assert len(begun) == 1
    assert box.told == []


def test_our_own_lock_on_a_dead_link_is_waited_for_and_anothers_is_not(box: Box) -> None:
    """The agent of a frozen link holds the lock until it misses our beats."""
    held = {"owner": owner(), "command": "deploy"}
    with box.session.open() as elder:
        elder.request("lock", held)
        tries: list[int] = []

        def work(conversation: Conversation) -> None:
            tries.append(1)
            if len(tries) == 1:
                cut(conversation)
            if len(tries) == 3:
                elder.close()
            conversation.request("lock", held)

        reconnecting(box.session, work, then="it goes on")
        assert len(tries) == 3
    with box.session.open() as stranger:
        stranger.request("lock", {"owner": "ann@desk", "command": "deploy"})

        def refused(conversation: Conversation) -> None:
            tries.append(1)
            if len(tries) == 4:
                cut(conversation)
            conversation.request("lock", held)

        with pytest.raises(OpsError) as locked:
            reconnecting(box.session, refused, then="it goes on")
        assert locked.value.kind == "locked"
        assert len(tries) == 5
