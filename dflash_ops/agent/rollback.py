"""Going back: `current` becomes the last release before it whose canary passed on the devices that are asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Dict, List, Optional, Set

from .arguments import Arguments
from .conversation import Conversation
from .devices import inventory, resolve
from .errors import AgentError, ExitCode
from .files import open_regular
from .lock import utc
from .releases import damage, linked, make_current
from .verdicts import Outcome, Verdict, VerdictStore
from .workdir import WorkDir


def op_verdicts(conversation: Conversation, _: Arguments) -> Dict[str, Any]:
    """Every verdict that is kept, newest first, without its evidence."""
    kept = [verdict.to_json() for verdict in VerdictStore.of(conversation.work).all()]
    return {"verdicts": [{key: value for key, value in verdict.items() if key != "evidence"} for verdict in kept]}


def op_rollback(conversation: Conversation, args: Arguments) -> Dict[str, Any]:
    """Touches no run. AgentError `no_release` that tells why each release before `current` was passed over."""
    work = conversation.work
    conversation.lock.refuse_if_taken()
    devices = resolve(args.table("workload"), inventory()).names
    before = linked(work.root / "current")
    store = VerdictStore.of(work)
    verdicts = store.all()
    passed_over: List[Dict[str, str]] = []
    for release in _earlier(work, before):
        why = _why_not(work, release, _last_on(verdicts, release, devices))
        if why is None:
            make_current(work, release)
            work.record("rollback", release=release, previous=before, devices=devices)
            return {"current": release, "previous": before, "devices": devices, "passed_over": passed_over}
        began = store.undecided_on(release, devices)
        if began is not None:
            ask = f"`dflash-ops deploy --release {release[:12]}`"
            why += f"; one that began at {utc(began)} never decided: ask it anew with {ask}"
        passed_over.append({"release": release, "why": why})
    reasons = "; ".join(f"{one['release'][:12]}: {one['why']}" for one in passed_over)
    raise AgentError(
        "no_release",
        f"there is no release to go back to for {', '.join(devices)}" + (f" ({reasons})" if reasons else ""),
        "releases of the host",
        "deploy a good tree (`dflash-ops deploy`), or prove one of these (`dflash-ops deploy --release DIGEST`)",
        ExitCode.USAGE,
        passed_over,
    )


def releases_to_go_back_to(work: WorkDir) -> Set[str]:
    """What a rollback would make current now, for each set of devices that a canary has decided on."""
    before, verdicts = linked(work.root / "current"), VerdictStore.of(work).all()
    earlier, found = _earlier(work, before), set()
    for devices in {tuple(verdict.binding.get("devices") or ()) for verdict in verdicts}:
        good = (one for one in earlier if _why_not(work, one, _last_on(verdicts, one, list(devices))) is None)
        found.add(next(good, ""))
    return found - {""}


def _last_on(verdicts: List[Verdict], release: str, devices: List[str]) -> Optional[Verdict]:
    """The release's newest verdict on exactly these devices, whatever the workload, the driver or the boot."""
    for verdict in verdicts:
        if verdict.binding.get("release") == release and verdict.binding.get("devices") == devices:
            return verdict
    return None


def _why_not(work: WorkDir, release: str, verdict: Optional[Verdict]) -> Optional[str]:
    if verdict is None:
        return "no canary has decided about it on these devices"
    if verdict.outcome is not Outcome.PASS:
        return f"its last canary on these devices: {verdict.outcome.value}"
    folder = work.release(release)
    return damage(folder, release) if folder.is_dir() else "it is not on this host any more"


def _earlier(work: WorkDir, current: Optional[str]) -> List[str]:
    """Releases that were current before this one, the last of them first.

    Who went back from one has left it: it is none to go back to until it is activated again.
    """
    history: List[str] = []
    for event in _changes(work.root / "events.ndjson"):
        release = str(event.get("release"))
        if event["event"] == "rollback" and release in history:
            del history[history.index(release) + 1 :]
        else:
            history = [*(one for one in history if one != release), release]
    return [release for release in reversed(history) if release != current]


def _changes(path: Path) -> List[Dict[str, Any]]:
    """The events that moved `current`, oldest first."""
    found = []
    try:
        with open_regular(path) as file:
            for line in file:
                if b"activate" not in line and b"rollback" not in line:
                    continue
                try:
                    event = json.loads(line)
                except ValueError:  # cut off by a full disk
                    continue
                if isinstance(event, dict) and event.get("event") in ("activate", "rollback"):
                    found.append(event)
    except FileNotFoundError:
        return []
    return found
