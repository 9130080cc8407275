"""Our end of the wire, with a real agent at the other: what is sent ahead, and a peer that says nothing any more."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import dflash_ops.transport.conversation as wire
from dflash_ops.agent.frames import DATA, encode_data
from dflash_ops.config import load_host, load_playbook
from dflash_ops.deploy import reconnect
from dflash_ops.deploy.deploying import Choices, Outcome, deploy
from dflash_ops.deploy.events import Event, Events
from dflash_ops.deploy.session import Session
from dflash_ops.errors import OpsError, TransportError
from dflash_ops.transport import Conversation
from tests.commands import Desk, eventually
from tests.deploy.turns import CountingChannel, CountingTransport

BEAT_S = 2.0
"""Long enough for a busy machine, short enough to wait for three."""
DATA_HEAD = len(encode_data(0, b""))


@pytest.fixture
def way() -> CountingTransport:
    return CountingTransport()


@pytest.fixture
def conversation(way: CountingTransport, tmp_path: Path) -> Iterator[Conversation]:
    with Conversation(
        way, python=sys.executable, workdir=str(tmp_path / "work"), host="box", beat=BEAT_S
    ) as conversation:
        yield conversation


def test_what_is_sent_ahead_costs_one_round_trip(way: CountingTransport, conversation: Conversation) -> None:
    conversation.ahead("facts")
    conversation.ahead("probe", {"python": sys.executable})
    conversation.ahead("runs")
    assert conversation.request("facts")["python_executable"] == sys.executable
    assert conversation.request("probe", {"python": sys.executable})["executable"]
    assert conversation.request("runs") == {"runs": []}
    assert way.turns == 1
    # it was one answer: who asks again asks the host again
    assert conversation.request("runs") == {"runs": []}
    assert way.turns == 2


def test_answers_may_be_taken_in_another_order_or_not_at_all(conversation: Conversation) -> None:
    conversation.ahead("facts")
    conversation.ahead("status", {"run": "nobody"})
    conversation.ahead("probe", {"python": sys.executable})
    with pytest.raises(OpsError) as skipped:
        conversation.request("probe", {"python": sys.executable})
    assert skipped.value.kind == "skipped"
    with pytest.raises(OpsError) as unknown:
        conversation.request("status", {"run": "nobody"})
    assert unknown.value.kind == "unknown_run"
    assert conversation.request("runs") == {"runs": []}


@pytest.fixture
def frozen(way: CountingTransport, conversation: Conversation) -> Iterator[None]:
    """The agent is there and answers nothing, as behind a link that swallows every byte."""
    conversation.request("runs")
    process = way.channels[0]._process
    os.kill(process.pid, signal.SIGSTOP)
    yield
    process.kill()


@pytest.mark.usefixtures("frozen")
def test_a_peer_that_answers_nothing_is_noticed(conversation: Conversation) -> None:
    with pytest.raises(TransportError) as silence:
        conversation.request("runs")
    assert silence.value.lost
    assert f"no sign of life from the agent for {3 * BEAT_S:g} s" in silence.value.what


@pytest.mark.usefixtures("frozen")
def test_a_peer_that_takes_nothing_is_noticed_while_we_write(conversation: Conversation) -> None:
    with pytest.raises(TransportError) as silence:
        # more than any pipe or window holds
        for _ in range(100):
            conversation.ahead("runs", {"padding": "x" * 1_000_000})
    assert silence.value.lost
    assert "no sign of life" in silence.value.what
    assert not conversation.alive


def test_a_deploy_is_one_start_and_one_of_what_is_there_two_round_trips(
    tmp_path: Path, desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    # the first steps are waited for in further requests
    desk.write_playbook(run={"probation_steps": 0})
    host, _ = load_host("box", desk.folder / "hosts", env={}, last_host=None)
    playbook = load_playbook(str(desk.folder / "playbooks" / "tiny.yaml"))

    def deployed(*, detach: bool) -> CountingTransport:
        told: list[Event] = []
        with Session(host, Events(told.append)) as session:
            session._transport = way = CountingTransport()
            deploy(session, playbook, session.events, Choices(runs=tmp_path / "runs", detach=detach), Outcome())
        assert any(event["event"] == ("launched" if detach else "collected") for event in told)
        return way

    # to its end, with the log and the files of the run
    assert len(deployed(detach=False).channels) == 1
    warm = deployed(detach=True)
    assert len(warm.channels) == 1
    # everything up to the verdict; the launch
    assert warm.turns == 2, "what a stage before the verdict asks for belongs into Stages.ask_ahead too"


@pytest.fixture
def session(way: CountingTransport, desk: Desk) -> Iterator[Session]:
    host, _ = load_host("box", desk.folder / "hosts", env={}, last_host=None)
    with Session(host, Events(lambda event: None)) as session:
        session._transport = way
        yield session


def test_a_host_is_reached_before_anything_is_asked(way: CountingTransport, session: Session) -> None:
    session.open_ahead()
    eventually(lambda: len(way.channels) == 1)
    with session.conversation() as conversation:
        assert conversation.request("runs") == {"runs": []}
    assert len(way.channels) == 1


def test_why_a_host_could_not_be_reached_ahead_is_told_when_it_is_needed(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(argv: Sequence[str]) -> CountingChannel:
        raise TransportError("no route")

    monkeypatch.setattr(session._transport, "open", refuse)
    session.open_ahead()
    with pytest.raises(TransportError, match="no route"):
        session.open()


def test_a_host_that_was_reached_for_nothing_is_left(way: CountingTransport, desk: Desk) -> None:
    """The build was refused meanwhile."""
    host, _ = load_host("box", desk.folder / "hosts", env={}, last_host=None)
    with Session(host, Events(lambda event: None)) as session:
        session._transport = way
        session.open_ahead()
    eventually(lambda: len(way.channels) == 1 and way.channels[0].wait(0) is not None)


class CutChannel(CountingChannel):
    """Dies in the upload, once the host has written what was sent."""

    sent = 0
    left: int | None = None
    part: Path

    def write(self, data: bytes) -> None:
        super().write(data)
        if data[:1] != DATA:
            return
        self.sent += len(data) - DATA_HEAD
        if self.left is not None and self.sent >= self.left:
            eventually(lambda: sum(path.stat().st_size for path in self.part.glob("*.tgz.part")) == self.sent)
            self._process.kill()
            raise TransportError("the cable is cut", lost=True)


class CutTransport(CountingTransport):
    """Its first channel is cut after `left` bytes of an upload."""

    def __init__(self, left: int, releases: Path) -> None:
        super().__init__()
        self._left, self._releases = left, releases

    def open(self, argv: Sequence[str]) -> CutChannel:
        channel = CutChannel(super().open(argv)._process)
        channel.part = self._releases
        channel.left = None if len(self.channels) > 1 else self._left
        self.channels[-1] = channel
        return channel


def test_an_upload_goes_on_in_the_same_command_where_the_link_broke(
    tmp_path: Path, desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(wire, "CHUNK_BYTES", 2048)
    monkeypatch.setattr(reconnect, "sleep", lambda seconds: None)
    host, _ = load_host("box", desk.folder / "hosts", env={}, last_host=None)
    playbook = load_playbook(str(desk.folder / "playbooks" / "tiny.yaml"))
    told: list[Event] = []
    with Session(host, Events(told.append)) as session:
        session._transport = way = CutTransport(3 * 2048, desk.folder / "work" / "releases")
        choices = Choices(runs=tmp_path / "runs", detach=True, skip_reason="the wire is what is tested")
        deploy(session, playbook, session.events, choices, Outcome())
    (lost,) = [event for event in told if event["event"] == "link_lost"]
    assert "the cable is cut" in lost["what"]
    (built,) = [event for event in told if event["event"] == "built"]
    first, second = (channel.sent for channel in way.channels if isinstance(channel, CutChannel))
    assert first == 3 * 2048
    # no byte went twice
    assert first + second == built["bytes"]
    assert any(event["event"] == "launched" for event in told)
