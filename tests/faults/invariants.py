"""What must hold after any fault. Written from docs/agent-protocol.md and docs/trainer-contract.md, with no code of
dflash_ops, so that a fault there cannot hide itself. Each check returns sentences; none is good."""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.faults.cases import TYPED, Case, Fault, Scenario
from tests.faults.sites import Site, read_json
from tests.typist import Command, wait_until

DIGEST = re.compile(r"[0-9a-f]{64}")
STATES = ("RUNNING", "SUCCEEDED", "FAILED", "STOPPED", "OOM", "LOST")
BEATS = 3
UNFINISHED = re.compile(
    r".*\.(part|piece|tmp|tgz|damaged)|\.incoming|\.(current|previous)\..*|.*\.pyz\..*|running\.json"
)

# after the fault, before anything else is typed


def after_fault(site: Site, case: Case, command: Command, run: str | None) -> Iterator[str]:
    yield from _how_it_ended(case, command)
    if site.link is not None and site.link.given_up and case.place.event != TYPED:
        yield "the command hung on the dead link until that was cut"
    yield from _one_run_at_a_time(site)
    yield from _a_verdict_for_each_run(site)
    yield from whole_releases(site.view("releases"))
    for folder in site.view("runs").glob("*/out/checkpoints"):
        yield from whole_checkpoints(folder)
    for folder in site.desk.runs.glob("*/checkpoints"):
        yield from whole_checkpoints(folder)
    if run is not None:
        yield from _what_a_follower_saw(site, case, command, run)
    yield from _no_lock_left(site, case)
    # a command that was killed has left its own for the next one to sweep
    if case.fault is not Fault.CLIENT:
        yield from _nothing_temporary(site)


def _how_it_ended(case: Case, command: Command) -> Iterator[str]:
    if case.fault is Fault.CLIENT:
        return
    last = command.events[-1] if command.events else {}
    errors = [event for event in command.events if event["event"] == "error"]
    if last.get("event") != "result" or last.get("exit") != command.code:
        yield f"the command ended with {command.code}, its last word was {last}"
    if command.code not in (0, 4, 5, 6, 7, 8, 9):
        yield f"the command ended with {command.code}: {errors}"
    if command.code != 0 and not (errors and errors[0]["what"] and errors[0]["fix"]):
        yield f"the command ended with {command.code} and does not say why, and what to do: {errors}"
    if case.fault in (Fault.DELAY, Fault.CLOCK) and command.code != 0:
        yield f"nothing broke, and yet the command ended with {command.code}: {errors}"
    if case.scenario is Scenario.DEPLOY and command.code == 0 and last.get("state") != "SUCCEEDED":
        yield f"deploy ended with 0, its run is {last.get('state')}"


def _one_run_at_a_time(site: Site) -> Iterator[str]:
    living = site.living_runs()
    if len(living) > 1:
        yield f"several runs live on one device: {sorted(living)}"


def _a_verdict_for_each_run(site: Site) -> Iterator[str]:
    for run in site.runs():
        record = read_json(site.view(f"runs/{run}/run.json")) or {}
        verdict = read_json(site.view(f"runs/{run}/verdict.json")) or {}
        if not record.get("skipped_canary") and (
            verdict.get("outcome") != "pass" or verdict.get("digest") != record.get("verdict")
        ):
            yield f"run {run} began without a verdict: {record.get('verdict')}, {verdict.get('outcome')}"


def whole_releases(folder: Path) -> Iterator[str]:
    for release in folder.glob("*"):
        if not DIGEST.fullmatch(release.name):
            continue
        manifest = read_json(release / "manifest.json") or {}
        listed = manifest.get("files")
        if not isinstance(listed, list):
            yield f"release {release.name[:12]} has no whole manifest"
            continue
        told = [{key: entry[key] for key in ("path", "size", "sha256", "mode")} for entry in listed]
        told.sort(key=lambda entry: str(entry["path"]))
        if _sha256(json.dumps(told, sort_keys=True, separators=(",", ":")).encode()) != release.name:
            yield f"release {release.name[:12]}: its manifest is another's"
        yield from _differences(
            release, {entry["path"]: entry["sha256"] for entry in listed}, f"release {release.name}"
        )


def whole_checkpoints(folder: Path) -> Iterator[str]:
    for checkpoint in folder.glob("*"):
        if checkpoint.suffix == ".part":
            continue
        manifest = read_json(checkpoint / "manifest.json") or {}
        listed = manifest.get("files")
        if not isinstance(listed, list):
            problems = [f"{checkpoint} has no whole manifest"]
        else:
            hashes = {entry["path"]: entry["sha256"] for entry in listed}
            problems = list(_differences(checkpoint, hashes, str(checkpoint)))
        # a trainer that lives keeps only its last ones
        if checkpoint.exists():
            yield from problems


def _differences(folder: Path, listed: dict[str, str], name: str) -> Iterator[str]:
    there = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    there.pop("manifest.json", None)
    for path in sorted(listed.keys() ^ there.keys()):
        yield f"{name}: {path} {'is missing' if path in listed else 'is not in its manifest'}"
    for path in sorted(listed.keys() & there.keys()):
        if _sha256(_content(there[path])) != listed[path]:
            yield f"{name}: {path} is not what its manifest says"


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def host_log(site: Site, run: str) -> list[str]:
    """Lines as a follower prints them; the one without an end only counts once the run has ended."""
    data = b"".join(path.read_bytes() for path in sorted(site.view(f"runs/{run}/log").glob("*.log")))
    return data.decode(errors="replace").split("\n")


def _what_a_follower_saw(site: Site, case: Case, command: Command, run: str) -> Iterator[str]:
    seen = [event["line"] for event in command.events if event["event"] == "log" and event["source"] == "run"]
    log = host_log(site, run)
    for number, (one, other) in enumerate(zip(seen, log, strict=False)):
        if one != other:
            yield f"line {number} of run {run} was shown as {one!r}, it is {other!r}"
            return
    if len(seen) > len(log):
        yield f"more lines of run {run} were shown than there are: {seen[len(log) :]}"
    follows = case.scenario in (Scenario.DEPLOY, Scenario.FOLLOW)
    if follows and command.code == 0 and site.view(f"runs/{run}/exit.json").exists():
        missing = [line for line in log[len(seen) :] if line]
        if missing:
            yield f"the follower of run {run} ended well and yet missed {missing}"


def _no_lock_left(site: Site, case: Case) -> Iterator[str]:
    """An agent lets go of the lock before it ends; one that could not do that holds it for three beats."""
    yield from _no_agent_left(site)
    owner = read_json(site.view("lock/owner.json"))
    if owner is not None and case.fault not in (Fault.AGENT, Fault.CONTAINER):
        yield f"no agent lives, and the lock was not let go: {owner}"

    def free() -> bool:
        owner = read_json(site.view("lock/owner.json"))
        if owner is None:
            return True
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - float(str(owner["beat"]))
        return age > BEATS * float(str(owner["beat_s"]))

    try:
        wait_until(free, "the lock is let go")
    except AssertionError:
        yield f"the lock is still held: {read_json(site.view('lock/owner.json'))}"


# after the next commands


def after_all(site: Site, states: dict[str, str]) -> Iterator[str]:
    """`states`: what `collect` said of each run."""
    yield from _no_agent_left(site)
    yield from _nothing_unfinished(site)
    yield from _nothing_temporary(site)
    yield from whole_releases(site.view("releases"))
    yield from _a_verdict_for_each_run(site)
    yield from _never_two_launched(site)
    for run, state in states.items():
        yield from _an_honest_state(site, run, state)
        yield from _all_came_home(site, run)
    if site.living_runs():
        yield f"runs still live: {site.living_runs()}"


def _no_agent_left(site: Site) -> Iterator[str]:
    try:
        wait_until(lambda: not site.agents(), "agents end")
    except AssertionError:
        yield f"agents are left: {site.agents()}"


def _nothing_unfinished(site: Site) -> Iterator[str]:
    work = site.view()
    for path in work.rglob("*"):
        relative = path.relative_to(work)
        # what a trainer that was killed left in its own folder goes with its run
        if UNFINISHED.fullmatch(path.name) and "out" not in relative.parts:
            yield f"{relative} was left on the host"
    yield from (f"{path.relative_to(work)} was left on the host" for path in (work / "scratch").glob("*"))
    yield from (f"{path} was left here" for path in site.desk.runs.rglob("*") if UNFINISHED.fullmatch(path.name))
    if site.rig is not None:
        yield from (f"{path} was left on the node" for path in site.rig.left_of_pushes())


def _nothing_temporary(site: Site) -> Iterator[str]:
    """Releases are built in the workstation's temporary folder."""
    yield from (f"{path.name} was left in this workstation's TMPDIR" for path in site.temporary.iterdir())


def _never_two_launched(site: Site) -> Iterator[str]:
    """From the host's own record: no launch while an earlier run lives (a lost one has no end that could be told)."""
    living: set[str] = set()
    for event in _records(site.view("events.ndjson")):
        if event["event"] == "launch":
            for run in living:
                # on a full disk the record may lack an end that exit.json has
                ended = (read_json(site.view(f"runs/{run}/exit.json")) or {}).get("ended")
                if isinstance(ended, float) and ended > event["time"]:
                    yield f"run {event['run']} was launched while {run} lived"
            living.add(event["run"])
        if event["event"] == "exit":
            living.discard(event["run"])


def _records(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text().splitlines():
        try:
            yield json.loads(line)
        except ValueError:
            # a full disk cuts a line in the middle
            continue


def _an_honest_state(site: Site, run: str, state: str) -> Iterator[str]:
    folder = site.view(f"runs/{run}")
    ended, result = read_json(folder / "exit.json"), read_json(folder / "out" / "result.json")
    if state not in STATES:
        yield f"run {run} is in a state that nobody knows: {state}"
    if state == "SUCCEEDED" and (result or {}).get("outcome") not in ("completed", "stopped"):
        yield f"run {run} is said to have succeeded, its result is {result}"
    if (state == "LOST") != (ended is None):
        yield f"run {run} is {state}, and its supervisor's last word is {ended}"


def _all_came_home(site: Site, run: str) -> Iterator[str]:
    """`collect` has just ended well: what is complete there is here."""
    host, home = site.view(f"runs/{run}"), site.desk.runs / run
    for path in sorted(host.glob("log/*.log")):
        here = home / "log" / path.name
        if not here.exists() or here.read_bytes() != path.read_bytes():
            yield f"{path.name} of run {run} did not come home whole"
    there = {path.name for path in host.glob("out/checkpoints/*") if (path / "manifest.json").exists()}
    here_ = {path.name for path in home.glob("checkpoints/*")}
    if missing := sorted(name for name in there - here_ if not name.endswith(".part")):
        yield f"checkpoints of run {run} did not come home: {missing}"
    yield from whole_checkpoints(home / "checkpoints")
