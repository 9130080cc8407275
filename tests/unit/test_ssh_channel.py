"""A link that is cut while something is being sent: one kind of error, whatever was sent."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import paramiko
import pytest

from dflash_ops.errors import TransportError
from dflash_ops.transport.connecting import quick_transport
from dflash_ops.transport.ssh import SshChannel


class Cut:
    """A socket whose sending side can be cut; it goes on waiting for bytes, as at the moment of the cut."""

    def __init__(self, inner: socket.socket) -> None:
        self._inner = inner
        self.cut = False

    def send(self, data: bytes) -> int:
        if self.cut:
            raise BrokenPipeError
        return self._inner.send(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class Anyone(paramiko.ServerInterface):
    def check_auth_none(self, username: str) -> int:
        return paramiko.AUTH_SUCCESSFUL

    def check_channel_request(self, kind: str, chanid: int) -> int:
        return paramiko.OPEN_SUCCEEDED


@pytest.fixture
def link() -> Iterator[tuple[Cut, SshChannel, paramiko.Channel]]:
    """Our side's socket and channel, and the server's channel."""
    ours, theirs = socket.socketpair()
    cut = Cut(ours)
    server, client = paramiko.Transport(theirs), paramiko.Transport(cut)
    server.add_server_key(paramiko.ECDSAKey.generate())
    server.start_server(event=threading.Event(), server=Anyone())
    try:
        client.start_client()
        client.auth_none("anyone")
        channel = client.open_session()
        channel.settimeout(60)
        there = server.accept(60)
        assert there is not None
        yield cut, SshChannel(channel, "ssh box"), there
    finally:
        client.close()
        server.close()


@pytest.mark.parametrize("say", [lambda each: each.write(b"frame"), lambda each: each.finish_input()])
def test_what_is_sent(link: tuple[Cut, SshChannel, paramiko.Channel], say: Callable[[SshChannel], None]) -> None:
    cut, channel, _ = link
    cut.cut = True
    with pytest.raises(TransportError) as caught:
        say(channel)
    assert (caught.value.lost, caught.value.where) == (True, "ssh box")
    assert caught.value.what.startswith("the SSH connection broke: ")
    channel.close()


def test_an_acknowledgement_of_what_was_read(link: tuple[Cut, SshChannel, paramiko.Channel]) -> None:
    cut, channel, there = link
    # so much that a read has to open the window again, and not more than goes at once
    there.sendall(bytes(1 << 20))
    assert channel.read(1)
    cut.cut = True
    with pytest.raises(TransportError) as caught:
        while channel.read(1 << 16):
            pass
    assert caught.value.lost


def test_aes_gcm_is_what_two_sides_that_have_it_agree_on() -> None:
    ours, theirs = socket.socketpair()
    server, client = paramiko.Transport(theirs), quick_transport()(ours)
    server.add_server_key(paramiko.ECDSAKey.generate())
    server.start_server(event=threading.Event(), server=Anyone())
    try:
        client.start_client()
        assert "gcm" in client.local_cipher and "gcm" in client.remote_cipher
    finally:
        client.close()
        server.close()
