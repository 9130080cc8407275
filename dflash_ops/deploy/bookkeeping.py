"""Keeps the ledger: one more view of the events that a command emits about one host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from dflash_ops.deploy.events import Event
from dflash_ops.deploy.ledger import CANARY, RUN, Entry, Ledger


def entry_of_run(host: str, summary: Mapping[str, Any], seen: float) -> Entry:
    """`summary` as the agent's `status` gives it."""
    skipped = summary.get("skipped_canary")
    return Entry(
        host=host,
        run=summary["run"],
        kind=RUN,
        seen=seen,
        state=summary["state"],
        playbook=summary.get("playbook"),
        release=summary.get("release"),
        started=summary.get("started"),
        ended=summary.get("ended"),
        # the host's gate lets nothing else train
        verdict=None if skipped or summary.get("prepares") else "pass",
        skipped=skipped,
        parent=summary.get("parent"),
        devices=_names(summary.get("devices")),
        last=summary.get("last"),
    )


def entry_of_verdict(host: str, verdict: Mapping[str, Any], seen: float, folder: str | None = None) -> Entry:
    """`verdict` as the agent's `verdicts` or the event of that name gives it. A canary is named by its folder there."""
    binding = verdict["binding"]
    return Entry(
        host=host,
        run=PurePosixPath(verdict["log"]).parent.name,
        kind=CANARY,
        seen=seen,
        playbook=verdict["playbook"],
        release=binding["release"],
        started=verdict["made"],
        verdict=verdict["outcome"],
        devices=_names(binding["devices"]),
        folder=folder,
    )


def _names(devices: object) -> tuple[str, ...]:
    return tuple(str(device) for device in devices) if isinstance(devices, list | tuple) else ()


class Bookkeeper:
    """Called with each event. Runs that are only met, perhaps many, are written by `write` in one transaction."""

    def __init__(self, host: str, ledger: Ledger) -> None:
        self._host = host
        self._ledger = ledger
        self._record: Event = {}
        self._devices: tuple[str, ...] | None = None
        self._met: list[Entry] = []

    def __call__(self, event: Event) -> None:
        name, seen = event["event"], event["time"]
        if name == "record":
            self._record = event
        elif name == "verdict":
            self._devices = _names(event["binding"]["devices"])
            folder = None if event["reused"] else self._folder
            self._ledger.put([entry_of_verdict(self._host, event, seen, folder)])
        elif name == "launched":
            self._ledger.put([self._launched(event)])
        elif name == "restarted":
            self._ledger.put([self._restarted(event)])
        elif name == "ended":
            ended = (event["exit"] or {}).get("ended")
            self._ledger.put([Entry(self._host, event["run"], RUN, seen, state=event["state"], ended=ended)])
        elif name == "collected":
            folder = str(Path(event["folder"]).resolve())
            self._ledger.put([Entry(self._host, event["run"], RUN, seen, folder=folder)])
        elif name == "run" and "as_of" not in event:
            self._met.append(entry_of_run(self._host, event, seen))

    def write(self) -> None:
        """What was met since the last time."""
        self._ledger.put(self._met)
        self._met = []

    @property
    def _folder(self) -> str | None:
        folder = self._record.get("folder")
        return None if folder is None else str(Path(folder).resolve())

    def _restarted(self, event: Event) -> Entry:
        """By its host: as what it goes on with, as far as this command knows that."""
        began = self._began(event["child"], event["time"])
        return replace(began, skipped=self._record.get("skipped_canary"), parent=event["run"])

    def _launched(self, event: Event) -> Entry:
        skipped = event.get("skipped_canary")
        return replace(
            self._began(event["run"], event["time"]),
            verdict=None if skipped or event.get("prepares") else "pass",
            skipped=skipped,
            parent=self._record.get("parent"),
            folder=self._folder,
            launched=event["time"],
        )

    def _began(self, run: str, when: float) -> Entry:
        return Entry(
            host=self._host,
            run=run,
            kind=RUN,
            seen=when,
            state="RUNNING",
            playbook=self._record.get("playbook"),
            release=self._record.get("release"),
            started=when,
            devices=self._devices,
        )
