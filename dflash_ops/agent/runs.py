"""Runs as they lie on the disk, and what state each is in."""

from __future__ import annotations

import enum
import json
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Dict, List, Optional

from . import units
from .arguments import Arguments
from .disk import free_bytes_near
from .errors import AgentError, ExitCode
from .files import read_json, tail_lines
from .full_disk import FULL_BYTES
from .logfiles import LogFolder
from .processes import Mark, ProcessId, boot_id, process_with
from .successor import Kind, Outcome, Successor
from .watch import plain
from .workdir import WorkDir

if TYPE_CHECKING:
    from .conversation import Conversation

DISK_LOW = "disk_low.json"
"""That the disk is nearly full, as its supervisor saw it."""
UNTOLD = "untold.json"
"""What `notify` could not tell anybody, the last of it."""


class RunState(str, enum.Enum):
    RUNNING = "RUNNING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    STOPPED = "STOPPED"
    OOM = "OOM"
    LOST = "LOST"


_EVIDENCE_STATES = (RunState.FAILED, RunState.OOM, RunState.LOST)


@dataclass(frozen=True)
class RunFolder:
    """runs/<run>/ and what is written there; nothing is remembered between two questions."""

    path: Path

    @property
    def run(self) -> str:
        return self.path.name

    @property
    def root(self) -> Path:
        """The work directory."""
        return self.path.parent.parent

    @property
    def out(self) -> Path:
        return self.path / "out"

    @property
    def metrics(self) -> Path:
        return self.out / "metrics.ndjson"

    @property
    def log(self) -> LogFolder:
        return LogFolder(self.path / "log")

    @property
    def stop_file(self) -> Path:
        return self.path / "stop.json"

    @property
    def state_file(self) -> Path:
        return self.path / "state.json"

    @property
    def secrets_file(self) -> Path:
        """There only from the launch until the supervisor has read it."""
        return self.path / "secrets.json"

    @property
    def exit_file(self) -> Path:
        return self.path / "exit.json"

    def record(self) -> Dict[str, Any]:
        """run.json; empty when the run was never begun."""
        return read_json(self.path / "run.json") or {}

    def settings(self) -> Dict[str, Any]:
        """What the trainer was given (the contract's document); empty where it cannot be read."""
        return read_json(self.path / "settings.json") or {}

    def begun_with(self) -> List[Path]:
        """The checkpoint that it began with, to go on from or for its weights; none where it began with neither."""
        training = self.settings().get("training")
        values = [training.get(key) for key in ("resume_from", "init_from")] if isinstance(training, dict) else []
        return [Path(value) for value in values if isinstance(value, str)]

    def prepares(self) -> Optional[Path]:
        """The folder of the data that it makes, named by their key; None for a run that trains."""
        found = self.record().get("prepares")
        return Path(found) if isinstance(found, str) else None

    def planned_steps(self) -> Optional[int]:
        training = self.settings().get("training")
        steps = training.get("steps") if isinstance(training, dict) else None
        return steps if isinstance(steps, int) else None

    def supervisor(self) -> Optional[ProcessId]:
        """The supervisor's process, if it lives in this boot."""
        state = read_json(self.state_file) or {}
        process = ProcessId.from_json(state.get("supervisor"))
        if process is None or state.get("boot_id") != boot_id():
            return None
        if process.alive:
            return process
        # who launched it may have been killed before the supervisor wrote of itself: it may be on its way
        return None if state.get("job") else process_with(["supervise", str(self.path)])

    def state(self) -> RunState:
        supervised = self.supervisor() is not None
        # read after the look at the supervisor: it writes exit.json before it goes
        ended = self.ended()
        if ended is not None:
            return RunState(ended["state"])
        return RunState.RUNNING if supervised else RunState.LOST

    def successor(self) -> Optional[Successor]:
        """What goes on with this run. One whose supervisor is gone does not wait for anything any more."""
        supervised = self.supervisor() is not None
        # read after the look at the supervisor: it writes next.json before it goes
        found = Successor.of(self.path)
        if found is None or found.outcome is not Outcome.WAITING or supervised:
            return found
        return replace(found, outcome=Outcome.REFUSED, why="its supervisor did not live to start it again", due=None)

    @property
    def starts_again(self) -> bool:
        """Whether it has ended, and its supervisor waits to start it again: its devices are kept for that."""
        found = self.successor()
        return found is not None and found.outcome is Outcome.WAITING and self.ended() is not None

    @property
    def goes_on(self) -> bool:
        """Whether it runs, or its host has not decided yet what goes on with it."""
        return self.state() is RunState.RUNNING or self.starts_again

    def ended(self) -> Optional[Dict[str, Any]]:
        """exit.json; a damaged one says nothing."""
        value = read_json(self.exit_file)
        known = value is not None and value.get("state") in [state.value for state in RunState]
        return value if known else None

    def devices(self) -> Optional[List[str]]:
        """None where the record is damaged: then nobody knows."""
        found = self.record().get("devices")
        return [str(name) for name in found] if isinstance(found, list) else None

    def begun(self) -> Optional[float]:
        """When it began (Unix seconds); None for a folder in which no run ever began."""
        file = self.path / "run.json"
        if not file.exists():
            return None
        started = self.record().get("started")
        return float(started) if isinstance(started, (int, float)) else file.stat().st_mtime

    def sequence(self) -> Optional[int]:
        """Its number among the runs of this work directory; None where the record is damaged."""
        found = self.record().get("sequence")
        return found if isinstance(found, int) else None

    @property
    def mark(self) -> Mark:
        """What finds all that lives and was started for this run."""
        return Mark.of_run(self.root, self.run)

    def summary(self) -> Dict[str, Any]:
        """What `status` says of a run; `evidence` is the end of the log where a run ended badly."""
        record, state = self.record(), self.state()
        ended, following = self.ended(), self.successor()
        job = (read_json(self.state_file) or {}).get("job")
        return {
            "run": self.run,
            "state": state.value,
            "release": record.get("release"),
            "started": self.begun(),
            "ended": None if ended is None else ended.get("ended"),
            "exit": ended,
            "pid": job.get("pid") if isinstance(job, dict) else None,
            "unit": record.get("unit"),
            "user": record.get("user"),
            "devices": self.devices() or [],
            "playbook": record.get("playbook"),
            "prepares": record.get("prepares"),
            "python": record.get("python"),
            "managed": record.get("managed"),
            "skipped_canary": record.get("skipped_canary"),
            "parent": record.get("parent"),
            "next": None if following is None else following.to_json(),
            "last": self._last_step(),
            "said": self._said(state),
            "disk_low": self.disk_low() or self._full_disk(state),
            "untold": read_json(self.path / UNTOLD),
            "hint": self._hint() if state is RunState.LOST else None,
            "evidence": (self.log.tail() or None) if state in _EVIDENCE_STATES else None,
        }

    def disk_low(self) -> Optional[Dict[str, Any]]:
        """What its supervisor said once of a disk that is nearly full."""
        return read_json(self.path / DISK_LOW)

    def _full_disk(self, state: RunState) -> Optional[Dict[str, Any]]:
        """The same as anybody sees it: on a full disk its supervisor cannot write it down."""
        free = free_bytes_near(self.out) if state is RunState.RUNNING else None
        if free is None or free >= FULL_BYTES:
            return None
        what = (
            f"the disk of {self.root} is full: {free} bytes are free; `dflash-ops prune --dry-run` shows what could go"
        )
        return {"v": 1, "time": time.time(), "free_bytes": free, "checkpoint_bytes": None, "what": what}

    def _hint(self) -> Optional[str]:
        """How a run ended that left no exit.json, as far as others tell. It decides nothing."""
        began, unit = (read_json(self.state_file) or {}).get("boot_id"), self.record().get("unit")
        if began is not None and began != boot_id():
            return "its host has booted since"
        return units.ending_of(unit) if isinstance(unit, str) else None

    def _said(self, state: RunState) -> Optional[str]:
        """The last line of its log, of a run that prepares data: it records no steps by which to see how far it is."""
        if self.prepares() is None or state is not RunState.RUNNING:
            return None
        return next((line for line in reversed(self.log.tail()) if line.strip()), None)

    def _last_step(self) -> Optional[Dict[str, Any]]:
        for line in reversed(tail_lines(self.metrics, 1000)):
            try:
                value = json.loads(line)
            except ValueError:  # the line that is being written, or was cut off by the limit
                continue
            if isinstance(value, dict) and value.get("kind") == "step":
                found: Dict[str, Any] = plain(value)
                return found
        return None


def all_runs(work: WorkDir) -> List[RunFolder]:
    """Every run that was begun, newest first, whatever the wall clock did in between.

    One whose record is damaged comes after those that began before it, as far as the clock tells.
    """
    begun = []
    for path in work.runs.iterdir():
        folder = RunFolder(path)
        started = folder.begun()
        if started is not None:
            begun.append((folder.sequence(), started, path.name, folder))
    numbered = [(number, started) for number, started, _, _ in begun if number is not None]

    def place(number: Optional[int], started: float) -> int:
        return max((n for n, before in numbered if before <= started), default=0) if number is None else number

    ordered = sorted(((place(number, started), started, name), folder) for number, started, name, folder in begun)
    return [folder for _, folder in reversed(ordered)]


def next_sequence(work: WorkDir) -> int:
    """For a run that begins. To be called under the guard."""
    return 1 + max((folder.sequence() or 0 for folder in all_runs(work)), default=0)


def find_run(work: WorkDir, run: Optional[str]) -> RunFolder:
    """The run of that name, or the latest; AgentError `unknown_run`."""
    runs = all_runs(work)
    for folder in runs:
        if run is None or folder.run == run:
            return folder
    names = [folder.run for folder in runs[:10]]
    raise AgentError(
        "unknown_run",
        "nothing has run on this host yet" if run is None else f"there is no run {run!r} on this host",
        str(work.runs),
        f"choose one of: {', '.join(names)}" if names else "start one: dflash-ops deploy",
        ExitCode.USAGE,
        names,
    )


def last_restart(work: WorkDir, folder: RunFolder) -> RunFolder:
    """The run that `folder` has become by restarts; itself where there was none."""
    while True:
        found = folder.successor()
        if found is None or found.kind is not Kind.RESTART or found.run is None:
            return folder
        folder = RunFolder(work.runs / found.run)


def op_runs(conversation: Conversation, _: Arguments) -> Dict[str, Any]:
    return {"runs": [folder.summary() for folder in all_runs(conversation.work)]}


def op_status(conversation: Conversation, args: Arguments) -> Dict[str, Any]:
    return find_run(conversation.work, args.optional_run()).summary()
