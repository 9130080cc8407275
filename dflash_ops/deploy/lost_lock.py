"""A command whose link broke while it held the host's lock asks the host afterwards what became of both."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

from dflash_ops.deploy.reconnect import reconnecting
from dflash_ops.deploy.session import Session
from dflash_ops.deploy.times import utc
from dflash_ops.errors import STOPPED, ExitCode, OpsError, TransportError, printable
from dflash_ops.transport import Conversation

if TYPE_CHECKING:
    from dflash_ops.deploy.deploying import Outcome
    from dflash_ops.deploy.stages import Stages

PATIENCE_S = 30.0
"""For a link that comes back. What is asked for is only what to tell the person."""
LOOK_S = 0.5
LOST = "lock_lost"


@dataclass(frozen=True)
class _Fate:
    """`taken`: by whom the lock was taken away. `launched`: None where nobody can say yet."""

    taken: dict[str, Any] | None
    launched: bool | None


@contextmanager
def telling_a_lost_lock(stages: Stages, outcome: Outcome) -> Iterator[None]:
    """Errors of the block say who took the lock (exit 9), and whether `outcome.run` was launched, where that is known.

    `outcome.run` is None afterwards where it certainly was not.
    """
    try:
        yield
    except OpsError as error:
        link = error if isinstance(error, TransportError) else error.__cause__
        # in a container that was stopped nobody is there who could be asked
        broke = isinstance(link, TransportError) and link.lost and link.kind != STOPPED
        if error.kind != LOST and not broke:
            raise
        # nothing may be begun there any more while it is asked
        stages.conversation.close()
        fate = _ask(stages.session, stages.lock_token, outcome.run)
        if fate is not None:
            _explain(error, fate, outcome)
        raise


def _explain(error: OpsError, fate: _Fate, outcome: Outcome) -> None:
    """Changes it in place: it is the same failure, better known."""
    run = outcome.run
    if fate.launched is False:
        outcome.run = None
    if fate.taken is not None and error.kind != LOST:
        who, command, since = (fate.taken.get(name) for name in ("owner", "command", "since"))
        at = f" at {utc(since)}" if isinstance(since, int | float) else ""
        error.what = printable(f"this command lost the lock of the host: {who} took the lock over with `{command}`{at}")
        error.kind, error.exit_code = LOST, ExitCode.LOCKED
        error.where = error.where or "lock of the host"
    if run is None:
        if error.kind == LOST:
            error.fix = "nothing was launched; see who holds the host: `dflash-ops unlock`"
    elif fate.launched:
        error.fix = f"run {run} was launched, and goes on: `dflash-ops tail-logs -f {run}`"
    elif fate.launched is False:
        again = "see who holds the host: `dflash-ops unlock`" if error.kind == LOST else "run the same command again"
        error.fix = f"nothing was launched; {again}"


def _ask(session: Session, token: str | None, run: str | None) -> _Fate | None:
    """None where the host does not answer."""

    def ask(conversation: Conversation) -> _Fate:
        until = monotonic() + PATIENCE_S
        held, taken = _lock(conversation, token)
        # an agent that still holds it may be at the launch; it goes once it has missed our beats
        while held and monotonic() < until:
            sleep(LOOK_S)
            held, taken = _lock(conversation, token)
        launched = None if run is None else _is_there(conversation, run)
        return _Fate(taken, None if launched is False and held else launched)

    try:
        return reconnecting(session, ask, then="asking what became of it", give_up_s=PATIENCE_S)
    except OpsError:
        return None


def _lock(conversation: Conversation, token: str | None) -> tuple[bool, dict[str, Any] | None]:
    """Whether that conversation holds it still, and who took it."""
    if token is None:
        return False, None
    answer = conversation.request("lock_fate", {"token": token})
    taken = answer.get("taken")
    return bool(answer.get("held")), taken if isinstance(taken, dict) else None


def _is_there(conversation: Conversation, run: str) -> bool:
    try:
        conversation.request("status", {"run": run})
    except OpsError as error:
        if error.kind != "unknown_run":
            raise
        return False
    return True
