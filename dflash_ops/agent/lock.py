"""One deploy at a time on this host: `lock/owner.json`, kept alive by a beat on the boot-time clock."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Callable, Dict, Optional

from .errors import AgentError, ExitCode
from .files import atomic_write, exclusive, read_json, write_json
from .frames import MISSED_BEATS
from .processes import ProcessId, boot_id, boottime_s
from .workdir import WorkDir

# a command that has just ended may not have let go yet
_PATIENCE_S = 2.0


@dataclass(frozen=True)
class Owner:
    """`since` is Unix time, `beat` and `beat_s` seconds of CLOCK_BOOTTIME; `token` tells two owners apart.

    `agent` is the process that holds it, on this host; None where the record does not say.
    """

    owner: str
    command: str
    since: float
    boot_id: str
    beat: float
    beat_s: float
    token: str
    agent: Optional[ProcessId]

    @classmethod
    def from_json(cls, value: Dict[str, Any]) -> "Owner":
        return cls(
            str(value.get("owner", "?")),
            str(value.get("command", "?")),
            float(value.get("since", 0)),
            str(value.get("boot_id", "")),
            float(value.get("beat", 0)),
            float(value.get("beat_s", 5)),
            str(value.get("token", "")),
            ProcessId.from_json(value.get("agent")),
        )

    def to_json(self) -> Dict[str, Any]:
        return asdict(self)

    @property
    def agent_lives(self) -> Optional[bool]:
        """None where nobody can say."""
        if self.boot_id != boot_id():
            return False
        return None if self.agent is None else self.agent.alive

    @property
    def unheard_s(self) -> float:
        """Seconds since its last beat."""
        return boottime_s() - self.beat

    @property
    def stale(self) -> bool:
        """Its agent is gone, or over 3 beats silent; a beat from the future is of another boot in disguise."""
        return self.agent_lives is False or not -1 <= self.unheard_s <= MISSED_BEATS * self.beat_s

    def refuse_if_alive(self) -> None:
        """AgentError `locked` unless its agent is known to be gone, or nobody can say and it is stale."""
        if self.agent_lives or (self.agent_lives is None and not self.stale):
            raise _locked(self)

    def describe(self) -> Dict[str, Any]:
        """For people: who, what, since when, when last heard of (seconds), whether its agent lives."""
        return {
            "owner": self.owner,
            "command": self.command,
            "since": self.since,
            "unheard_s": round(self.unheard_s, 1) if self.boot_id == boot_id() else None,
            "agent": None if self.agent is None else self.agent.pid,
            "agent_lives": self.agent_lives,
            "stale": self.stale,
            "token": self.token,
        }


def _read(folder: Path) -> Optional[Owner]:
    """None also where nobody can say whose it is: a damaged record holds nothing."""
    value = read_json(folder / "owner.json")
    try:
        return None if value is None else Owner.from_json(value)
    except (TypeError, ValueError):
        return None


def holder(work: WorkDir) -> Optional[Owner]:
    """Who has the lock of this host, a stale one too."""
    return _read(work.lock)


def taken_from(work: WorkDir, token: str) -> Optional[Dict[str, Any]]:
    """`{"owner", "command", "since"}` of who took the lock that had this token; None where nobody did, or it was long
    ago."""
    last = read_json(work.lock_taken) or {}
    if last.get("from") != token:
        return None
    return {name: last.get(name) for name in ("owner", "command", "since")}


def utc(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))


def _locked(owner: Owner) -> AgentError:
    return AgentError(
        "locked",
        f"{owner.owner} holds this host with `{owner.command}` since {utc(owner.since)}",
        "lock of the host",
        "wait until it ends (a lock whose client is gone frees itself), or see what it does: dflash-ops unlock",
        ExitCode.LOCKED,
        owner.describe(),
    )


class Lock:
    """The lock of one conversation; `release` may be called at any time and more than once."""

    def __init__(self, work: WorkDir, beat_s: float) -> None:
        self._work = work
        self._beat_s = beat_s
        self._token = os.urandom(8).hex()
        self._released = threading.Event()
        self._held = False

    def acquire(
        self, owner: str, command: str, lost: Callable[[str], None], *, take_from: Optional[str] = None
    ) -> Optional[Owner]:
        """Takes the lock and keeps it alive in a thread; `lost` is called if another took it over meanwhile.

        Returns whose it was before. A living owner gives way only where `take_from` is its token.
        """
        until = time.monotonic() + _PATIENCE_S
        me = ProcessId.of(os.getpid())
        while True:
            with exclusive(self._work.guard):
                present = _read(self._work.lock)
                if present is None or present.stale or present.token in (self._token, take_from):
                    mine = Owner(owner, command, time.time(), boot_id(), boottime_s(), self._beat_s, self._token, me)
                    shutil.rmtree(self._work.lock, ignore_errors=True)
                    self._work.lock.mkdir(mode=0o700)
                    self._write(mine)
                    break
            if time.monotonic() > until:
                raise _locked(present)
            time.sleep(0.1)
        self._held = True
        threading.Thread(target=self._keep, args=(mine, lost), daemon=True, name="lock").start()
        former = None if present is None or present.token == self._token else present
        if former is not None:
            self._keep_taking(former, mine)
        self._note("lock", owner=owner, command=command, taken_from=None if former is None else former.owner)
        return former

    @property
    def token(self) -> str:
        return self._token

    def _keep_taking(self, former: Owner, mine: Owner) -> None:
        told = {"v": 1, "from": former.token, "owner": mine.owner, "command": mine.command, "since": mine.since}
        # a full disk must not keep the lock held
        with contextlib.suppress(OSError):
            write_json(self._work.lock_taken, told, durable=False)

    def is_mine(self, owner: Owner) -> bool:
        return owner.token == self._token

    def refuse_if_taken(self) -> None:
        """AgentError `locked` while another conversation holds the lock."""
        present = _read(self._work.lock)
        if present is not None and present.token != self._token and not present.stale:
            raise _locked(present)

    def release(self) -> None:
        self._released.set()
        if not self._held:
            return
        with exclusive(self._work.guard):
            present = _read(self._work.lock)
            if present is not None and present.token == self._token:
                shutil.rmtree(self._work.lock)
                self._note("unlock", owner=present.owner, command=present.command)
        self._held = False

    def _note(self, event: str, **fields: Any) -> None:
        # a full disk must not keep the lock held
        with contextlib.suppress(OSError):
            self._work.record(event, **fields)

    def _write(self, owner: Owner) -> None:
        atomic_write(self._work.lock / "owner.json", json.dumps(owner.to_json()).encode(), durable=False)

    def _keep(self, mine: Owner, lost: Callable[[str], None]) -> None:
        while not self._released.wait(self._beat_s):
            with exclusive(self._work.guard):
                if self._released.is_set():
                    return
                present = _read(self._work.lock)
                if present is None or present.token != self._token:
                    break
                try:
                    self._write(replace(mine, beat=boottime_s()))
                except OSError:
                    # a full disk: the next beat may find room; once stale, others may take the lock, so we stop
                    if present.stale:
                        break
        else:
            return
        if present is None:
            lost("the lock was removed by hand")
        elif present.token == self._token:
            lost("the disk is full, so that the lock could not be kept alive")
        else:
            lost(f"{present.owner} took the lock over with `{present.command}` at {utc(present.since)}")
