"""A broken link is met again: what was begun goes on, in the same command, from where it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import monotonic, sleep
from typing import TypeVar

from dflash_ops.deploy.session import Session, owner
from dflash_ops.errors import OpsError, TransportError
from dflash_ops.transport import Conversation

RETRY_S = (1, 2, 4, 8, 15, 30)
"""Waits before another try; the last one repeats."""
GIVE_UP_S = 600.0
HOPELESS = frozenset({"host_key", "auth", "not_root", "sudo", "no_pct", "container_missing", "protocol", "verify"})
"""Trying again changes nothing about these."""

Made = TypeVar("Made")


@contextmanager
def conversing(
    session: Session, begin: Callable[[Conversation], Made], *, then: str, give_up_s: float = GIVE_UP_S
) -> Iterator[tuple[Conversation, Made]]:
    """A conversation in which `begin` has come to its end, and what it returned.

    When the link breaks in `begin`, a new conversation is opened and `begin` called again, from its first line: it
    asks the host (or looks at the disk here) how far it got, and goes on from there. `then` says so to the person:
    "the run goes on". Nothing is tried again inside the block: what is done there, nobody can know whether it came
    to pass. The last error is raised after `give_up_s` seconds without anything moving, and at once where the host was
    never reached by this command.
    """
    patience = _Patience(session, then, give_up_s)
    while True:
        moved, opened = False, monotonic()
        try:
            conversation = session.open()
            try:
                made = begin(conversation)
                break
            except BaseException:
                moved = conversation.moved or (conversation.started and monotonic() - opened > RETRY_S[-1])
                conversation.close()
                raise
        except OpsError as error:
            patience.wait(error, moved=moved)
    with session.holding(conversation):
        yield conversation, made


def reconnecting(
    session: Session, work: Callable[[Conversation], Made], *, then: str, give_up_s: float = GIVE_UP_S
) -> Made:
    """`work`'s return value. As `conversing`, for work that is done when it returns.

    Use: `reconnecting(session, lambda conversation: collect(conversation, ...), then="what is here is kept")`, where
    `collect` skips what it has already brought.
    """
    with conversing(session, work, then=then, give_up_s=give_up_s) as (_, made):
        return made


@dataclass
class _Patience:
    """Waits before another try, or raises: longer each time, from the start again once something moved."""

    session: Session
    then: str
    give_up_s: float
    _tries: int = 0
    _since: float = field(default_factory=monotonic)

    def wait(self, error: OpsError, *, moved: bool) -> None:
        if moved:
            self._tries = 0
        if self._tries == 0:
            self._since = monotonic()
        if not self._worth_it(error) or monotonic() - self._since > self.give_up_s:
            raise error
        pause = RETRY_S[min(self._tries, len(RETRY_S) - 1)]
        self._tries += 1
        self.session.events.emit("link_lost", what=error.what, again_in_s=pause, then=self.then)
        sleep(pause)

    def _worth_it(self, error: OpsError) -> bool:
        if error.kind == "locked":
            # our own agent on the other end of a dead link holds the lock until it misses our beats
            return self._tries > 0 and isinstance(error.evidence, dict) and error.evidence.get("owner") == owner()
        if not isinstance(error, TransportError) or error.kind in HOPELESS:
            return False
        return self.session.spoken
