"""A host that is being worked with: its transport, and conversations on it."""

from __future__ import annotations

import getpass
import os
import socket
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from dflash_ops.agent.bundle import agent_bundle
from dflash_ops.agent.masking import Masks
from dflash_ops.agent.variables import Variables
from dflash_ops.config import Host
from dflash_ops.deploy.bookkeeping import Bookkeeper
from dflash_ops.deploy.events import Events
from dflash_ops.deploy.ledger import Ledger
from dflash_ops.deploy.variables import read_notify, read_variables
from dflash_ops.transport import Conversation, Pusher, transport_for

REMOTE_STREAMS = 4
QUICK_SWITCH_S = 0.0005
HANDSHAKE_S = 0.15


@dataclass(frozen=True)
class Facts:
    """What the host said about itself; `raw` is the agent's whole answer."""

    hostname: str
    workdir: str
    raw: dict[str, Any]


class Session:
    """Opens the transport once, and one conversation as long as it holds."""

    def __init__(self, host: Host, events: Events) -> None:
        self.host = host
        self.events = events
        self.spoken = False
        """Whether its agent ever answered here: then a failure may be a broken link, otherwise a wrong inventory."""
        self._kept: Conversation | None = None
        self._coming: Future[Conversation] | None = None
        self._keeping = threading.Lock()
        ledger = Ledger.at(os.environ, lambda text: events.emit("notice", text=text))
        bookkeeper = Bookkeeper(host.name, ledger)
        events.watch(bookkeeper, bookkeeper.write)
        self._transport = transport_for(host, lambda text: events.emit("notice", text=text))

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        if self._coming is not None:
            # nobody waits for a host that is not needed any more
            self._coming.add_done_callback(_close)
        kept = self._keep(None)
        if kept is not None:
            kept.close()
        self._transport.close()

    @property
    def python(self) -> str:
        """The host's interpreter, for the agent and for the trainer."""
        return self.host.python

    def open(self) -> Conversation:
        """The conversation that was left whole before, else a new one. Hand it to `holding`, or close it.

        deploy/reconnect.py is for work that outlives a broken link.
        """
        kept = self._keep(None)
        if kept is not None:
            if kept.alive:
                kept.moved = False
                return kept
            kept.close()
        coming, self._coming = self._coming, None
        return self._begin() if coming is None else coming.result()

    def open_ahead(self) -> None:
        """Begins the conversation that `open` will return, while something else is done here: reaching a host takes a
        second or two. What goes wrong with it is raised by `open`.

        A secret that cannot be read (OpsError, exit 2) stops the command before its host is reached.
        """
        if self._coming is not None or self._kept is not None:
            return
        _ = self.variables, self.notify
        self._coming = coming = Future[Conversation]()
        before = sys.getswitchinterval()
        # a handshake is twenty short steps: behind a busy thread each of them would wait for the whole interval
        sys.setswitchinterval(QUICK_SWITCH_S)

        def begin() -> None:
            try:
                coming.set_result(self._begin())
            except BaseException as error:
                coming.set_exception(error)
            finally:
                sys.setswitchinterval(before)

        # made in a thread beside a busy one it takes five times as long: it is eighty small files
        agent_bundle()
        threading.Thread(target=begin, name="open-ahead", daemon=True).start()
        # on a short link a handshake is over sooner than the next import, and all that follows on the host waits for it
        wait([coming], HANDSHAKE_S)

    def _begin(self) -> Conversation:
        return Conversation(
            self._transport,
            python=self.python,
            workdir=self.host.workdir,
            host=self.host.name,
            on_start=self._reached,
        )

    @contextmanager
    def holding(self, conversation: Conversation) -> Iterator[Conversation]:
        """Closes the conversation when the block fails; otherwise it is kept for the next stage: each start costs."""
        try:
            yield conversation
        except BaseException:
            conversation.close()
            raise
        before = self._keep(conversation)
        if before is not None:
            before.close()

    def _keep(self, conversation: Conversation | None) -> Conversation | None:
        """Returns what was kept before. Files are collected in several threads."""
        with self._keeping:
            before, self._kept = self._kept, conversation
        return before

    @cached_property
    def variables(self) -> Variables:
        """Of the host's jobs. Its secrets are read here, once, and are masked in every event from then on."""
        found = read_variables(self.host, os.environ)
        self.events.hide(found.masks)
        return found

    @cached_property
    def notify(self) -> dict[str, object] | None:
        """Who is told what becomes of a run. A webhook's URL is masked like a secret."""
        found = read_notify(self.host, os.environ)
        if found is not None and "webhook" in found:
            self.events.hide(Masks.of([str(found["webhook"])]))
        return found

    @property
    def streams(self) -> int:
        """Conversations that are worth having at once for large files: on one machine a second brings nothing."""
        return 1 if self.host.transport == "local" else REMOTE_STREAMS

    @contextmanager
    def conversation(self) -> Iterator[Conversation]:
        with self.holding(self.open()) as conversation:
            yield conversation

    def _reached(self) -> None:
        self.spoken = True

    @property
    def pusher(self) -> Pusher | None:
        return self._transport.pusher


def _close(coming: Future[Conversation]) -> None:
    if coming.exception() is None:
        coming.result().close()


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
