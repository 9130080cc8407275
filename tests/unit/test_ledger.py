"""The workstation's ledger: it completes what it knows, is private, and is never in the way."""

from __future__ import annotations

import json
import os
import sqlite3
import stat
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from dflash_ops.deploy import ledger as ledger_module
from dflash_ops.deploy.bookkeeping import Bookkeeper
from dflash_ops.deploy.events import Events
from dflash_ops.deploy.ledger import CANARY, RUN, Entry, Ledger


class Book:
    """A ledger in a folder that is not there yet, and what it told."""

    def __init__(self, folder: Path) -> None:
        self.told: list[str] = []
        self.path = folder / "state" / "dflash-ops" / "ledger.sqlite3"
        self.ledger = Ledger.at({"XDG_STATE_HOME": str(folder / "state")}, self.told.append)

    def put(self, *entries: Entry) -> bool:
        return self.ledger.put(entries)


@pytest.fixture
def book(tmp_path: Path) -> Book:
    return Book(tmp_path)


def one(run: str = "a", **facts: Any) -> Entry:
    return Entry(**{"host": "box", "run": run, "kind": RUN, "seen": 1.0, "state": "RUNNING", **facts})


def test_what_is_not_known_leaves_what_was(book: Book) -> None:
    assert book.ledger.entries() == []
    assert not book.path.exists(), "a look makes no file"
    full = one(
        started=5.0,
        playbook="p",
        devices=("GPU-a", "GPU-b"),
        last={"step": 3},
        folder="/runs/a",
        launched=5.0,
        parent="z",
    )
    assert book.put(full)
    assert book.ledger.entries() == [full]
    assert book.put(one(state="STOPPED", seen=9.0, ended=8.0))
    (found,) = book.ledger.entries()
    assert (found.state, found.seen, found.ended) == ("STOPPED", 9.0, 8.0)
    assert (found.playbook, found.devices, found.last, found.folder, found.launched) == (
        "p",
        ("GPU-a", "GPU-b"),
        {"step": 3},
        "/runs/a",
        5.0,
    )
    assert book.told == []


def test_hosts_and_kinds_stay_apart_newest_first(book: Book) -> None:
    other = one("a", host="other", started=2.0)
    canary = one("c", kind=CANARY, started=3.0, verdict="pass")
    book.put(one("a", started=1.0), other, canary, one("b", started=4.0))
    assert [(entry.host, entry.run) for entry in book.ledger.entries()] == [
        ("box", "b"),
        ("box", "c"),
        ("other", "a"),
        ("box", "a"),
    ]
    assert [entry.run for entry in book.ledger.entries(host="box", kind=RUN)] == ["b", "a"]


def test_the_last_launched_is_of_this_workstation(book: Book) -> None:
    assert book.ledger.last_launched() is None
    book.put(one("met", started=9.0), one("mine", started=1.0, launched=1.0), one("older", launched=0.5))
    last = book.ledger.last_launched()
    assert last is not None
    assert last.run == "mine"


def test_only_its_owner_reads_it(book: Book) -> None:
    before = os.umask(0)
    try:
        book.put(one())
    finally:
        os.umask(before)
    assert stat.S_IMODE(book.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(book.path.parent.stat().st_mode) == 0o700


def test_what_a_host_says_damages_nothing(book: Book) -> None:
    assert book.put(one("\ud800", started=[1], playbook={"a": "\ud800"}, devices=("\ud800",), last={"x": "\udfff"}))
    assert book.put(one("b", started="soon", ended=10**400 // 10**399))
    assert {entry.run for entry in book.ledger.entries()} == {"?", "b"}
    assert book.told == []


def test_a_name_that_is_no_text_is_not_in_it(book: Book) -> None:
    book.put(one("a"))
    assert book.ledger.entries(run="a\udca0") == []
    assert [entry.run for entry in book.ledger.entries()] == ["a"]
    assert book.told == []


@pytest.mark.parametrize("how", ["garbage", "cut off", "another version", "another table", "a value of another kind"])
def test_a_damaged_one_is_set_aside_and_begun_anew(book: Book, how: str) -> None:
    book.put(*(one(str(number)) for number in range(300)))
    if how == "garbage":
        book.path.write_bytes(b"no ledger" * 1000)
    elif how == "cut off":
        book.path.write_bytes(book.path.read_bytes()[:5000])
    else:
        changes = {
            "another version": "PRAGMA user_version = -1",
            "another table": "ALTER TABLE entries RENAME TO others",
            "a value of another kind": "UPDATE entries SET devices = '{'",
        }
        with closing(sqlite3.connect(book.path)) as connection, connection:
            connection.execute(changes[how])
    content = book.path.read_bytes()
    assert book.ledger.entries() == []
    (said,) = book.told
    assert "set aside" in said
    assert "dflash-ops runs --rebuild" in said
    (aside,) = book.path.parent.glob("*.damaged-*")
    assert aside.read_bytes() == content
    assert book.put(one("new"))
    assert [entry.run for entry in book.ledger.entries()] == ["new"]
    assert len(book.told) == 1


def test_a_locked_one_is_left_alone(book: Book, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_module, "BUSY_S", 0.01)
    book.put(one())
    with closing(sqlite3.connect(book.path, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        assert not book.put(one("b"))
        assert book.ledger.entries() == []
        assert [("locked" in said, "set aside" in said) for said in book.told] == [(True, False)]
    assert [entry.run for entry in book.ledger.entries()] == ["a"]


def test_a_later_versions_is_left_to_it(book: Book) -> None:
    book.put(one())
    with closing(sqlite3.connect(book.path)) as connection, connection:
        connection.execute("PRAGMA user_version = 99")
    assert book.ledger.entries() == []
    assert not book.put(one("b"))
    (said,) = book.told
    assert "version 99, of a later dflash-ops" in said
    assert book.ledger.unusable
    assert list(book.path.parent.iterdir()) == [book.path]


def test_one_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file where a folder should be")
    book = Book(tmp_path)
    assert not book.put(one())
    assert book.ledger.entries() == []
    (said,) = book.told
    assert "cannot be used now" in said


def test_commands_at_the_same_time_lose_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # a slow disk is no failure here
    monkeypatch.setattr(ledger_module, "BUSY_S", 120.0)
    books = [Book(tmp_path) for _ in range(4)]

    def write(number: int) -> None:
        for count in range(5):
            books[number].put(one(f"{number}-{count}"))

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(books[0].ledger.entries()) == 20
    assert [book.told for book in books] == [[], [], [], []]


def test_it_is_kept_by_the_events_of_a_command(book: Book, tmp_path: Path) -> None:
    events = Events(lambda event: None)
    bookkeeper = Bookkeeper("box", book.ledger)
    events.watch(bookkeeper, bookkeeper.write)
    verdict = {
        "outcome": "pass",
        "made": 7.0,
        "log": "canary/20261129-151233-7f3a/log",
        "playbook": "tiny",
        "binding": {"release": "f" * 64, "devices": ["GPU-a"]},
    }
    events.emit("record", run="a", folder=str(tmp_path / "a"), playbook="tiny", release="f" * 64)
    events.emit("verdict", reused=False, **verdict)
    canary, (run,) = book.ledger.entries(kind=CANARY), book.ledger.entries(kind=RUN) or (None,)
    assert run is None
    assert [(entry.run, entry.verdict, entry.folder) for entry in canary] == [
        ("20261129-151233-7f3a", "pass", str(tmp_path / "a"))
    ]
    events.emit("launched", run="a", host="box", unit=None, skipped_canary=None)
    (run,) = book.ledger.entries(kind=RUN)
    assert (run.state, run.verdict, run.release, run.devices) == ("RUNNING", "pass", "f" * 64, ("GPU-a",))
    assert run.folder == str(tmp_path / "a")
    assert book.ledger.last_launched() == run
    events.emit("ended", run="a", state="FAILED", exit={"ended": 11.0})
    assert [(entry.state, entry.ended) for entry in book.ledger.entries(kind=RUN)] == [("FAILED", 11.0)]
    events.emit("restarted", run="a", child="a2", left=0)
    restarted = next(entry for entry in book.ledger.entries(kind=RUN) if entry.run == "a2")
    assert (restarted.state, restarted.parent, restarted.release) == ("RUNNING", "a", "f" * 64)
    # many at once: written when the command ends
    summary = {"state": "LOST", "started": 1.0, "skipped_canary": "in a hurry", "devices": ["cpu"], "last": {"step": 2}}
    events.emit("run", run="b", **summary)
    events.emit("run", run="never", as_of=1.0, **summary)
    events.end()
    assert [entry.run for entry in book.ledger.entries(kind=RUN)] == ["a2", "a", "b"]
    (lost,) = [entry for entry in book.ledger.entries() if entry.run == "b"]
    assert (lost.verdict, lost.skipped, json.dumps(lost.last)) == (None, "in a hurry", '{"step": 2}')


def test_a_user_without_a_home_has_none_and_is_not_stopped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    assert Ledger.at({}, lambda text: None).entries() == []
    assert Ledger.at({"XDG_STATE_HOME": f"{tmp_path}/{'x' * 300}"}, lambda text: None).entries() == []
