"""One deploy at a time on this host: `lock/owner.json`, kept alive by a beat on the boot-time clock."""

from __future__ import annotations

import datetime
import json
import secrets
import shutil
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Callable, Dict, Optional

from .errors import AgentError, ExitCode
from .files import atomic_write, exclusive, read_json
from .frames import MISSED_BEATS
from .processes import boot_id, boottime_s
from .workdir import WorkDir

# a command that has just ended may not have let go yet
_PATIENCE_S = 2.0


@dataclass(frozen=True)
class Owner:
    """`since` is Unix time, `beat` and `beat_s` seconds of CLOCK_BOOTTIME; `token` tells two owners apart."""

    owner: str
    command: str
    since: float
    boot_id: str
    beat: float
    beat_s: float
    token: str

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
        )

    @property
    def stale(self) -> bool:
        """Another boot, or over 3 beats old; a beat from the future is of another boot in disguise."""
        age = boottime_s() - self.beat
        return self.boot_id != boot_id() or not -1 <= age <= MISSED_BEATS * self.beat_s


def _read(folder: Path) -> Optional[Owner]:
    """None also where nobody can say whose it is: a damaged record holds nothing."""
    value = read_json(folder / "owner.json")
    try:
        return None if value is None else Owner.from_json(value)
    except (TypeError, ValueError):
        return None


def _locked(owner: Owner) -> AgentError:
    since = datetime.datetime.fromtimestamp(owner.since, datetime.timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
    return AgentError(
        "locked",
        f"{owner.owner} holds this host with `{owner.command}` since {since}",
        "lock of the host",
        "wait until it ends; a lock whose client is gone frees itself after 3 missed heartbeats",
        ExitCode.LOCKED,
        asdict(owner),
    )


class Lock:
    """The lock of one conversation; `release` may be called at any time and more than once."""

    def __init__(self, work: WorkDir, beat_s: float) -> None:
        self._work = work
        self._beat_s = beat_s
        self._token = secrets.token_hex(8)
        self._released = threading.Event()
        self._held = False

    def acquire(self, owner: str, command: str, lost: Callable[[str], None]) -> None:
        """Takes the lock and keeps it alive in a thread; `lost` is called if another took it over meanwhile."""
        until = time.monotonic() + _PATIENCE_S
        while True:
            with exclusive(self._work.guard):
                present = _read(self._work.lock)
                if present is None or present.stale or present.token == self._token:
                    mine = Owner(owner, command, time.time(), boot_id(), boottime_s(), self._beat_s, self._token)
                    shutil.rmtree(self._work.lock, ignore_errors=True)
                    self._work.lock.mkdir(mode=0o700)
                    self._write(mine)
                    break
            if time.monotonic() > until:
                raise _locked(present)
            time.sleep(0.1)
        self._held = True
        threading.Thread(target=self._keep, args=(mine, lost), daemon=True, name="lock").start()

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
        self._held = False

    def _write(self, owner: Owner) -> None:
        atomic_write(self._work.lock / "owner.json", json.dumps(asdict(owner)).encode(), durable=False)

    def _keep(self, mine: Owner, lost: Callable[[str], None]) -> None:
        while not self._released.wait(self._beat_s):
            with exclusive(self._work.guard):
                if self._released.is_set():
                    return
                present = _read(self._work.lock)
                if present is None or present.token != self._token:
                    break
                try:
                    self._write(Owner(**{**asdict(mine), "beat": boottime_s()}))
                except OSError:
                    # a full disk: the next beat may find room; once stale, others may take the lock, so we stop
                    if present.stale:
                        break
        else:
            return
        lost("another deploy took the lock over while this agent did not run")
