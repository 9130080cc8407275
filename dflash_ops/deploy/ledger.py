# ruff: noqa: S608 -- only names of columns are put into queries, never a value
"""The workstation's ledger: every run and canary that it started or met, on any host, in one SQLite file.

It is a copy of what hosts know, with the time of the last look, so it may be lost: a damaged file is set aside, and
`dflash-ops runs --rebuild` reads the hosts again. It never stops a command.
"""

from __future__ import annotations

import json
import os
import sqlite3
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

VERSION = 1
# of another command's transaction, which takes milliseconds
BUSY_S = 2.0
RUN, CANARY = "run", "canary"

Result = TypeVar("Result")


@dataclass(frozen=True)
class Entry:
    """One run or canary. `host` is its name in the inventory, times are Unix seconds.

    None: not known, or not so. In `Ledger.put` it leaves what was known before. `launched`: when this workstation
    launched it; `seen`: when its state was last heard from the host; `folder`: where its record is here;
    `last`: its last step's metrics; `skipped`: why it has no canary; `verdict`: of the canary it started with, or is.
    """

    host: str
    run: str
    kind: str
    seen: float
    state: str | None = None
    playbook: str | None = None
    release: str | None = None
    started: float | None = None
    ended: float | None = None
    verdict: str | None = None
    skipped: str | None = None
    parent: str | None = None
    devices: tuple[str, ...] | None = None
    folder: str | None = None
    launched: float | None = None
    last: Mapping[str, Any] | None = None


_COLUMNS = [field.name for field in fields(Entry)]
_NAMES = ", ".join(_COLUMNS)
_JSON = ("devices", "last")
_TIMES = ("seen", "started", "ended", "launched")
_CREATE = (
    "CREATE TABLE entries (host TEXT NOT NULL, run TEXT NOT NULL, kind TEXT NOT NULL, seen REAL NOT NULL, state TEXT, "
    "playbook TEXT, release TEXT, started REAL, ended REAL, verdict TEXT, skipped TEXT, parent TEXT, devices TEXT, "
    "folder TEXT, launched REAL, last TEXT, PRIMARY KEY (host, run)) WITHOUT ROWID"
)
_PUT = (
    f"INSERT INTO entries ({_NAMES}) VALUES ({', '.join('?' for _ in _COLUMNS)}) "
    "ON CONFLICT (host, run) DO UPDATE SET "
    + ", ".join(f"{name} = COALESCE(excluded.{name}, {name})" for name in _COLUMNS[2:])
)


class _Damaged(Exception):  # noqa: N818
    """The file is no ledger."""


class _Newer(Exception):  # noqa: N818
    """It is a later dflash-ops's, which goes on using it."""


class Ledger:
    """`notice` is told, in a sentence, what is wrong with the file; the answer is then as if it knew nothing."""

    def __init__(self, path: Path, notice: Callable[[str], None]) -> None:
        self._path = path
        self._notice = notice
        self.unusable = False
        """Whether it could not be looked into: then an empty answer says nothing."""

    @classmethod
    def at(cls, env: Mapping[str, str], notice: Callable[[str], None]) -> Ledger:
        """`$XDG_STATE_HOME/dflash-ops/ledger.sqlite3`; the specification says to ignore a relative value."""
        base = env.get("XDG_STATE_HOME", "")
        folder = (Path(base) if Path(base).is_absolute() else _home(env) / ".local/state") / "dflash-ops"
        return cls(folder / "ledger.sqlite3", notice)

    def put(self, entries: Iterable[Entry]) -> bool:
        """Adds or completes them, all or none. Whether it could."""
        rows = [_row(entry) for entry in entries]

        def write(connection: sqlite3.Connection) -> bool:
            connection.execute("BEGIN IMMEDIATE")
            connection.executemany(_PUT, rows)
            connection.execute("COMMIT")
            return True

        return bool(rows) and self._do(write, False)

    def entries(self, *, host: str | None = None, kind: str | None = None, run: str | None = None) -> list[Entry]:
        """Newest first."""
        given = (("host", host), ("kind", kind), ("run", run))
        wanted = {name: value for name, value in given if value is not None}
        where = " AND ".join(f"{name} = ?" for name in wanted) or "1"
        query = f"SELECT {_NAMES} FROM entries WHERE {where} ORDER BY started DESC, run DESC"
        return self._ask(query, tuple(wanted.values()))

    def last_launched(self) -> Entry | None:
        """The last run that was launched from here."""
        query = f"SELECT {_NAMES} FROM entries WHERE launched NOT NULL ORDER BY launched DESC LIMIT 1"
        return next(iter(self._ask(query, ())), None)

    def _ask(self, query: str, values: tuple[str, ...]) -> list[Entry]:
        if not os.path.exists(self._path):  # noqa: PTH110 -- Path.exists raises where it may not look
            return []
        return self._do(lambda connection: [_entry(row) for row in connection.execute(query, values)], [])

    def _do(self, work: Callable[[sqlite3.Connection], Result], otherwise: Result) -> Result:
        """A damaged file is replaced by an empty one, once; what cannot be used now is left alone."""
        for _ in range(2):
            inode = None
            try:
                inode = self._private_file()
                with closing(self._open()) as connection:
                    return work(connection)
            except sqlite3.OperationalError as error:
                # locked, read-only, a full disk: not the content's fault. A missing table or column is.
                if "no such" not in str(error):
                    self._unusable(str(error))
                    return otherwise
                self._set_aside(inode, str(error))
            except _Newer as error:
                self._unusable(str(error))
                return otherwise
            except UnicodeEncodeError:
                # what was asked for is no text that could stand in it
                return otherwise
            except (sqlite3.DatabaseError, _Damaged, ValueError, TypeError) as error:
                self._set_aside(inode, str(error))
            except OSError as error:
                self._unusable(error.strerror or str(error))
                return otherwise
        return otherwise

    def _unusable(self, why: str) -> None:
        """Told once a command: the next look may find it usable."""
        if not self.unusable:
            self.unusable = True
            self._notice(f"the ledger of this workstation cannot be used now ({why}): {self._path}")

    def _private_file(self) -> int:
        """Makes the file if it is not there, for its owner only; its inode."""
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            return os.fstat(handle).st_ino
        finally:
            os.close(handle)

    def _open(self) -> sqlite3.Connection:
        """With a rollback journal: a write-ahead log needs shared memory, which a home on NFS does not give."""
        connection = sqlite3.connect(self._path, timeout=BUSY_S, isolation_level=None)
        try:
            if self._version(connection) == 0:
                connection.execute("BEGIN IMMEDIATE")
                # another command may have been first
                if self._version(connection) == 0:
                    connection.execute(_CREATE)
                    connection.execute(f"PRAGMA user_version = {VERSION}")
                connection.execute("COMMIT")
            if (version := self._version(connection)) > VERSION:
                raise _Newer(f"it is of version {version}, of a later dflash-ops; this one reads {VERSION}")
            if version != VERSION:
                raise _Damaged(f"it is of version {version}")
        except BaseException:
            connection.close()
            raise
        return connection

    @staticmethod
    def _version(connection: sqlite3.Connection) -> int:
        return int(connection.execute("PRAGMA user_version").fetchone()[0])

    def _set_aside(self, inode: int | None, why: str) -> None:
        """Only the very file that was found damaged: another command may have replaced it already."""
        aside = self._path.with_name(f"{self._path.name}.damaged-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}")
        try:
            if self._path.stat().st_ino == inode:
                self._path.replace(aside)
                # it belongs to the damaged file and would be rolled back into the new one
                self._path.with_name(f"{self._path.name}-journal").unlink(missing_ok=True)
        except OSError:
            return
        self._notice(
            f"the ledger was damaged ({why}) and is set aside as {aside}; read it anew: dflash-ops runs --rebuild"
        )


def _row(entry: Entry) -> tuple[Any, ...]:
    """Only what the columns can hold: a host may say anything."""
    return tuple(_column(name, getattr(entry, name)) for name in _COLUMNS)


def _column(name: str, value: Any) -> str | float | None:
    if value is None:
        return None
    if name in _JSON:
        return json.dumps(value)
    if name in _TIMES:
        return float(value) if isinstance(value, int | float) else None
    return str(value).encode(errors="replace").decode()


def _entry(row: tuple[Any, ...]) -> Entry:
    values = dict(zip(_COLUMNS, row, strict=True))
    for name in _JSON:
        values[name] = None if values[name] is None else json.loads(values[name])
    values["devices"] = None if values["devices"] is None else tuple(values["devices"])
    return Entry(**values)


def _home(env: Mapping[str, str]) -> Path:
    try:
        return Path(env["HOME"]) if env.get("HOME") else Path.home()
    except RuntimeError:
        # a user without an entry: what Debian names the home of those
        return Path("/nonexistent")
