"""The runs of a host, or of all: from the host while it answers, from the ledger with its age where it does not."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dflash_ops.config import Host
from dflash_ops.deploy.bookkeeping import entry_of_run, entry_of_verdict
from dflash_ops.deploy.events import Events
from dflash_ops.deploy.holders import tell_holders
from dflash_ops.deploy.ledger import RUN, Entry, Ledger
from dflash_ops.deploy.session import Session
from dflash_ops.errors import ExitCode, OpsError, TransportError


def runs(session: Session, events: Events, ledger: Ledger) -> list[str]:
    """An event `run` for each run of the host, newest first; their ids.

    Raises TransportError (exit 4) where the host does not answer, after what the ledger knows of it.
    """
    try:
        with session.conversation() as conversation:
            found = conversation.request("runs")["runs"]
    except TransportError:
        _tell_known(events, session.host.name, ledger.entries(host=session.host.name, kind=RUN))
        raise
    for one in found:
        events.emit("run", **one)
    return [one["run"] for one in found]


def status(session: Session, events: Events, ledger: Ledger, run: str | None) -> dict[str, Any] | None:
    """The run's summary after who else holds the host; None where nothing has run yet but somebody is about to.

    Raises TransportError (exit 4) where the host does not answer, after what the ledger knows of the run.
    """
    try:
        with session.conversation() as conversation:
            holders = tell_holders(conversation, events, runs=False)
            try:
                return conversation.request("status", {"run": run})
            except OpsError as error:
                held = holders["lock"] or holders["leases"]
                if run is not None or error.kind != "unknown_run" or not held:
                    raise
                return None
    except TransportError:
        known = ledger.entries(host=session.host.name, kind=RUN)
        wanted = [entry for entry in known if run in (None, entry.run)]
        _tell_known(events, session.host.name, wanted[:1])
        raise


def keep_record(events: Events, ledger: Ledger, host: str, run: str) -> None:
    """The events of this command go to the record of the run too, where this workstation has one."""
    for entry in ledger.entries(host=host, kind=RUN):
        if entry.run == run and entry.folder is not None and Path(entry.folder).is_dir():
            events.keep_in(Path(entry.folder) / "events.ndjson")


def everything(events: Events, ledger: Ledger) -> list[str]:
    """Every run and canary of every host as the ledger knows them; connects to none."""
    known = ledger.entries()
    for entry in known:
        events.emit("run", **_known(entry))
    return [entry.run for entry in known]


def rebuild(hosts: Iterable[Host], events: Events, ledger: Ledger) -> None:
    """Reads every run and every kept verdict of these hosts into the ledger.

    What a host does not know any more stays. Raises OpsError (exit 4) in the end where a host did not answer.
    """
    silent = []
    for host in hosts:
        try:
            with Session(host, events) as session, session.conversation() as conversation:
                found = conversation.request("runs")["runs"]
                verdicts = conversation.request("verdicts")["verdicts"]
        except OpsError as error:
            silent.append(host.name)
            events.emit("notice", text=f"{host.name} is left out: {error.what}")
            continue
        now = time.time()
        ledger.put([entry_of_run(host.name, one, now) for one in found])
        ledger.put([entry_of_verdict(host.name, one, now) for one in verdicts])
        events.emit("read", host=host.name, runs=len(found), canaries=len(verdicts))
    if silent:
        raise OpsError(
            f"not read: {', '.join(silent)}",
            exit_code=ExitCode.UNREACHABLE,
            kind="rebuild",
            where="ledger of this workstation",
            fix="see what is wrong with each (dflash-ops doctor --host NAME), and type it again",
        )


def _tell_known(events: Events, host: str, known: list[Entry]) -> None:
    if known:
        events.emit("notice", text=f"{host} does not answer; this is what this workstation knew of it")
    for entry in known:
        events.emit("run", **_known(entry))


def _known(entry: Entry) -> dict[str, Any]:
    """As the agent's summary of a run, as far as it is known; `as_of`: when its state was last heard (Unix seconds)."""
    return {
        "run": entry.run,
        "host": entry.host,
        "kind": entry.kind,
        "state": entry.state,
        "verdict": entry.verdict,
        "release": entry.release,
        "started": entry.started,
        "ended": entry.ended,
        "devices": list(entry.devices or ()),
        "playbook": entry.playbook,
        "skipped_canary": entry.skipped,
        "parent": entry.parent,
        "folder": entry.folder,
        "last": entry.last,
        "as_of": entry.seen,
    }
