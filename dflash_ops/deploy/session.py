"""A host that is being worked with: its transport, and conversations on it."""

from __future__ import annotations

import getpass
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from dflash_ops.agent.variables import Variables
from dflash_ops.config import Host
from dflash_ops.deploy.events import Events
from dflash_ops.deploy.variables import read_variables
from dflash_ops.transport import Conversation, transport_for

REMOTE_STREAMS = 4


@dataclass(frozen=True)
class Facts:
    """What the host said about itself; `raw` is the agent's whole answer."""

    hostname: str
    workdir: str
    raw: dict[str, Any]


class Session:
    """Opens the transport once, and a conversation for each command."""

    def __init__(self, host: Host, events: Events) -> None:
        self.host = host
        self.events = events
        self.spoken = False
        """Whether the host was ever reached here: then a failure may be a broken link, otherwise a wrong inventory."""
        self._transport = transport_for(host, lambda text: events.emit("notice", text=text))

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self._transport.close()

    @property
    def python(self) -> str:
        """The host's interpreter, for the agent and for the trainer."""
        return self.host.python

    def open(self) -> Conversation:
        """A new conversation; whoever opens it closes it. deploy/reconnect.py for work that outlives a broken link."""
        conversation = Conversation(self._transport, python=self.python, workdir=self.host.workdir, host=self.host.name)
        self.spoken = True
        return conversation

    @cached_property
    def variables(self) -> Variables:
        """Of the host's jobs. Its secrets are read here, once, and are masked in every event from then on."""
        found = read_variables(self.host, os.environ)
        self.events.hide(found.masks)
        return found

    @property
    def streams(self) -> int:
        """Conversations that are worth having at once for large files: on one machine a second brings nothing."""
        return 1 if self.host.transport == "local" else REMOTE_STREAMS

    @contextmanager
    def conversation(self) -> Iterator[Conversation]:
        with self.open() as conversation:
            yield conversation

    def deliver(self, archive: Any, destination: str) -> bool:
        return self._transport.deliver(archive, destination)


def facts(conversation: Conversation) -> Facts:
    raw = conversation.request("facts")
    return Facts(hostname=str(raw["hostname"]), workdir=str(raw["workdir"]), raw=raw)


def owner() -> str:
    """Who holds the lock, for the person who meets it."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = "unknown"
    return f"{user}@{socket.gethostname()}"
