"""A whole deploy, read from top to bottom: build, check, stage, doctor, prepare, canary, launch, follow, collect."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_ops.config import Playbook
from dflash_ops.deploy.building import built, checked
from dflash_ops.deploy.events import Events
from dflash_ops.deploy.follow import follow
from dflash_ops.deploy.homecoming import bring_home
from dflash_ops.deploy.records import LastRun, create_record, new_run_id, remember_last
from dflash_ops.deploy.session import Session
from dflash_ops.deploy.stages import Stages, refuse_verdict
from dflash_ops.errors import ExitCode, OpsError, TransportError
from dflash_ops.files import write_json

GOOD_STATES = frozenset({"SUCCEEDED", "STOPPED"})


@dataclass(frozen=True)
class Choices:
    """What the person asked for beside host and playbook."""

    runs: Path
    detach: bool = False
    again: bool = False
    skip_reason: str | None = None


@dataclass
class Outcome:
    release: str = ""
    verdict: str | None = None
    run: str | None = None
    state: str | None = None
    folder: Path | None = None


def prove(session: Session, playbook: Playbook, events: Events, choices: Choices, outcome: Outcome) -> None:
    """Everything up to the verdict, under the host's lock. Raises OpsError: 6 when it failed, 7 when it cannot tell."""
    with _proven(session, playbook, events, choices, outcome, command="canary"):
        pass


def deploy(session: Session, playbook: Playbook, events: Events, choices: Choices, outcome: Outcome) -> None:
    """Raises OpsError with the exit code of the stage that stopped it; the run itself failing is exit 8."""
    with _proven(session, playbook, events, choices, outcome, command="deploy") as (stages, run, folder):
        # from here on it may run, whatever happens to this side
        outcome.run = run
        try:
            stages.launch(run, reason=choices.skip_reason)
        except TransportError as error:
            error.fix = f"it may have been launched: `dflash-ops status {run}`"
            raise
        except OpsError:
            outcome.run = None
            raise
        _remember(LastRun(session.host.name, run, str(folder.resolve())), events)
    if choices.detach:
        return
    status = watch(session, run, events)
    outcome.state = status["state"]
    bring_home(session, run, folder, events, patient=True)
    refuse_bad_end(status, session.host.name)


def _remember(last: LastRun, events: Events) -> None:
    try:
        remember_last(os.environ, last)
    except OSError as error:
        # a convenience must never part us from a run that has begun
        events.emit("notice", text=f"the last run cannot be remembered here ({error}): name the host next time")


@contextmanager
def _proven(
    session: Session, playbook: Playbook, events: Events, choices: Choices, outcome: Outcome, *, command: str
) -> Iterator[tuple[Stages, str, Path]]:
    """Inside the block the release is staged and proven (or the proof skipped), and the host's lock is held."""
    # a secret that cannot be read stops the command before anything is built or reached
    _ = session.variables
    with built(playbook, events) as release:
        outcome.release = release.digest
        checked(release, events)
        with session.conversation() as conversation:
            stages = Stages(session, conversation, playbook, events)
            stages.lock(command)
            stages.stage(release)
            stages.doctor()
            stages.refuse_busy()
            stages.prepare()
            run = new_run_id(playbook.name if command == "deploy" else f"{playbook.name}-canary")
            folder = create_record(
                choices.runs,
                run,
                {
                    "command": command,
                    "host": session.host.name,
                    "playbook": playbook.name,
                    "release": release.digest,
                    "skipped_canary": choices.skip_reason,
                },
            )
            outcome.folder = folder
            events.keep_in(folder / "events.ndjson")
            write_json(folder / "manifest.json", release.manifest.to_dict())
            if choices.skip_reason is None:
                _judge(stages, folder, again=choices.again, outcome=outcome)
            yield stages, run, folder


def _judge(stages: Stages, folder: Path, *, again: bool, outcome: Outcome) -> None:
    try:
        verdict = stages.canary(again=again)
    except TransportError as error:
        # killed half-way, no answer, rebooted: nobody knows, and nothing was launched
        outcome.verdict = "inconclusive"
        raise OpsError(
            f"the canary cannot tell: {error.what} while it ran",
            exit_code=ExitCode.INCONCLUSIVE,
            kind="canary",
            where=stages.session.host.name,
            fix="nothing was launched; once the host answers, run the same command again",
        ) from error
    outcome.verdict = verdict["outcome"]
    write_json(folder / "verdict.json", verdict)
    refuse_verdict(verdict, stages.session.host.name)


def watch(session: Session, run: str, events: Events) -> dict[str, Any]:
    """Follows to the end; log lines and steps become events. Returns the final status."""
    status = follow(
        session,
        run,
        wait=True,
        on_line=lambda line: events.emit("log", source="run", line=line),
        on_step=_step_event(events),
    )
    events.emit("ended", run=run, state=status["state"], exit=status["exit"])
    return status


def _step_event(events: Events) -> Callable[[dict[str, Any]], None]:
    def emit(record: dict[str, Any]) -> None:
        events.emit("progress", **{key: value for key, value in record.items() if key not in ("v", "time")})

    return emit


def refuse_bad_end(status: dict[str, Any], where: str) -> None:
    state = status["state"]
    if state in GOOD_STATES:
        return
    raise OpsError(
        f"run {status['run']} ended {state}",
        exit_code=ExitCode.RUN_FAILED,
        kind="run",
        where=where,
        fix=f"its log: `dflash-ops tail-logs {status['run']}`",
        evidence=status.get("evidence"),
    )
