"""A whole deploy, read from top to bottom: from build and check over tune and canary to launch, follow and collect."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_ops.agent.watch import plain
from dflash_ops.config import Playbook
from dflash_ops.deploy.building import built, checked
from dflash_ops.deploy.chain import through_restarts
from dflash_ops.deploy.endings import cause, what_next
from dflash_ops.deploy.events import Events
from dflash_ops.deploy.first_weights import OnHost, on_the_host
from dflash_ops.deploy.follow import follow
from dflash_ops.deploy.homecoming import bring_home
from dflash_ops.deploy.lost_lock import LOST, telling_a_lost_lock
from dflash_ops.deploy.probation import probation
from dflash_ops.deploy.reconnect import conversing
from dflash_ops.deploy.records import create_record, new_run_id, record_of
from dflash_ops.deploy.report import write_report
from dflash_ops.deploy.session import Session
from dflash_ops.deploy.stages import Stages, refuse_untuned, refuse_verdict
from dflash_ops.errors import STOPPED, ExitCode, OpsError, TransportError
from dflash_ops.files import write_json
from dflash_ops.transport import Conversation

LINK_PATIENCE_S = 120.0
"""How long a deploy that has launched nothing yet waits for its link."""
PREPARE = "prepare"
GOOD_STATES = frozenset({"SUCCEEDED", "STOPPED"})


@dataclass(frozen=True)
class Choices:
    """What the person asked for beside host and playbook."""

    runs: Path
    detach: bool = False
    again: bool = False
    tune: bool = False
    """Measure the strategies anew, though the trainer has a table."""
    skip_reason: str | None = None
    release: str | None = None
    """One that is on the host (`current`, `previous` or the digest's beginning) instead of a new build."""
    first: OnHost | None = None
    """The checkpoint on the host whose weights the run begins with."""


@dataclass
class Outcome:
    release: str = ""
    parent: str | None = None
    """The run that is resumed."""
    verdict: str | None = None
    run: str | None = None
    state: str | None = None
    folder: Path | None = None
    prepared: str | None = None
    """Where the data lie on the host, whole."""


def prove(session: Session, playbook: Playbook, events: Events, choices: Choices, outcome: Outcome) -> None:
    """Everything up to the verdict, under the host's lock. Raises OpsError: 6 when it failed, 7 when it cannot tell."""
    with (
        staged(session, playbook, choices, outcome, "canary") as stages,
        proven(stages, choices, outcome, "canary"),
    ):
        pass


def deploy(session: Session, playbook: Playbook, events: Events, choices: Choices, outcome: Outcome) -> None:
    """Raises OpsError with the exit code of the stage that stopped it; the run itself failing is exit 8."""
    with (
        staged(session, playbook, choices, outcome, "deploy") as stages,
        proven(stages, choices, outcome, "deploy") as (run, folder),
    ):
        policy = playbook.run.policy()
        launch(stages, run, choices, outcome, policy=policy)
    see_to_the_end(session, run, folder, choices, outcome, policy=policy)


def launch(
    stages: Stages,
    run: str,
    choices: Choices,
    outcome: Outcome,
    *,
    policy: dict[str, Any],
    key: str | None = None,
) -> dict[str, Any]:
    """What the host answers. `key`: of the data that the run is to prepare; None where it is to train."""
    # from here on it may run, whatever happens to this side
    outcome.run = run
    try:
        answer = stages.launch(run, reason=choices.skip_reason, policy=policy, parent=outcome.parent, key=key)
    except TransportError as error:
        first = f"{error.fix}; " if error.kind == STOPPED else ""
        error.fix = f"{first}it may have been launched: `dflash-ops status {run}`"
        raise
    except OpsError as error:
        if error.kind != LOST:
            outcome.run = None
        raise
    if not choices.detach or policy["probation_steps"]:
        stages.free_lock()
    return answer


def see_to_the_end(
    session: Session, run: str, folder: Path, choices: Choices, outcome: Outcome, *, policy: dict[str, Any]
) -> None:
    """Follows and collects, or sees the first steps where the person wants to walk away.

    Raises OpsError (exit 8) when the run failed.
    """
    if choices.detach:
        if steps := int(policy["probation_steps"]):
            seen = probation(session, run, steps, session.events)
            outcome.state = seen.state
            seen.refuse_bad_end(session.host.name)
        return
    host, events = session.host.name, session.events
    for status in through_restarts(run, lambda each: watch(session, each, events), events):
        outcome.run, outcome.state = status["run"], status["state"]
        if outcome.run != run:
            run, folder = status["run"], record_of(choices.runs, status, host)
            outcome.folder = folder
            events.keep_in(folder / "events.ndjson")
        home = bring_home(session, run, folder, events, patient=True)
    # its log is on the screen already
    refuse_bad_end({**status, "evidence": None}, host)
    home.refuse_damaged()


@contextmanager
def staged(session: Session, playbook: Playbook, choices: Choices, outcome: Outcome, command: str) -> Iterator[Stages]:
    """Inside the block the playbook's release is built, checked and on the host, and the host's lock is held."""
    # a secret that cannot be read stops the command before anything is built or reached
    _ = session.variables, session.notify
    then = "nothing was launched yet; it goes on where it was"
    if choices.release is not None:
        wanted = choices.release

        def begin_there(conversation: Conversation) -> Stages:
            chosen = on_the_host(conversation, playbook, choices.first, session.events)
            stages = Stages(session, conversation, chosen, session.events)
            stages.lock(command)
            stages.use(stages.named(wanted))
            stages.environment()
            return stages

        with (
            conversing(session, begin_there, then=then, give_up_s=LINK_PATIENCE_S) as (_, stages),
            telling_a_lost_lock(stages, outcome),
        ):
            outcome.release = stages.release
            yield stages
        return
    session.open_ahead()
    with built(playbook, session.events) as release:
        outcome.release = release.digest
        checked(release, session.events)

        def begin(conversation: Conversation) -> Stages:
            chosen = on_the_host(conversation, playbook, choices.first, session.events)
            stages = Stages(session, conversation, chosen, session.events)
            proven = command != PREPARE
            verdict = proven and not (choices.again or choices.tune or choices.skip_reason)
            stages.ask_ahead(release, command, free=proven, verdict=verdict)
            stages.lock(command)
            stages.stage(release)
            stages.environment()
            return stages

        with (
            conversing(session, begin, then=then, give_up_s=LINK_PATIENCE_S) as (_, stages),
            telling_a_lost_lock(stages, outcome),
        ):
            yield stages


@contextmanager
def proven(stages: Stages, choices: Choices, outcome: Outcome, command: str) -> Iterator[tuple[str, Path]]:
    """Inside the block what is staged is proven, or the proof skipped: the id of the run to be, and its folder here."""
    stages.doctor()
    stages.refuse_busy()
    stages.prepare()
    run = new_run_id(f"{stages.playbook.name}-canary" if command == "canary" else stages.playbook.name)
    folder = begin_record(stages, run, choices, outcome, command)
    tuned = _tune(stages, folder, again=choices.tune)
    if choices.skip_reason is None:
        # one name here and on the host; a deploy's folder is its run's
        canary = run if command == "canary" else f"{run}-canary"
        asked = "asked for again" if choices.again else None
        _judge(stages, canary, folder, again="the strategies were measured anew" if tuned else asked, outcome=outcome)
    yield run, folder


def begin_record(stages: Stages, run: str, choices: Choices, outcome: Outcome, command: str) -> Path:
    """The run's folder here; from now on the events are kept in it."""
    facts = {
        "command": command,
        "host": stages.session.host.name,
        "playbook": stages.playbook.name,
        "release": stages.release,
        "skipped_canary": choices.skip_reason,
        "parent": outcome.parent,
    }
    folder = create_record(choices.runs, run, facts)
    outcome.folder = folder
    stages.events.keep_in(folder / "events.ndjson")
    stages.events.emit("record", run=run, folder=str(folder), **facts)
    if stages.manifest is not None:
        write_json(folder / "manifest.json", stages.manifest)
    return folder


def _tune(stages: Stages, folder: Path, *, again: bool) -> bool:
    """Whether the strategies were measured now."""
    table = stages.tune(again=again)
    if table is None:
        return False
    write_json(folder / "tuning.json", table)
    refuse_untuned(table, stages.session.host.name)
    return True


def _judge(stages: Stages, canary: str, folder: Path, *, again: str | None, outcome: Outcome) -> None:
    try:
        verdict = stages.canary(canary, again=again)
    except TransportError as error:
        # killed half-way, no answer, rebooted: nobody knows, and nothing was launched
        outcome.verdict = "inconclusive"
        raise OpsError(
            f"the canary cannot tell: {error.what} while it ran",
            exit_code=ExitCode.INCONCLUSIVE,
            kind="canary",
            where=stages.session.host.name,
            fix=f"nothing was launched; {error.fix}"
            if error.kind == STOPPED
            else "nothing was launched; once the host answers, run the same command again",
        ) from error
    outcome.verdict = verdict["outcome"]
    write_json(folder / "verdict.json", verdict)
    write_report(folder)
    refuse_verdict(verdict, stages.session.host.name, folder)


def watch(session: Session, run: str | None, events: Events) -> dict[str, Any]:
    """Follows to the end; log lines and steps become events. Returns the final status."""
    return follow(
        session,
        run,
        wait=True,
        on_line=lambda line: events.emit("log", source="run", line=line),
        on_step=_step_event(events),
    )


def _step_event(events: Events) -> Callable[[dict[str, Any]], None]:
    def emit(record: dict[str, Any]) -> None:
        events.emit("progress", **{key: plain(value) for key, value in record.items() if key not in ("v", "time")})

    return emit


def refuse_bad_end(status: dict[str, Any], where: str) -> None:
    state = status["state"]
    if state in GOOD_STATES:
        return
    because = cause(status)
    raise OpsError(
        f"run {status['run']} ended {state}" + (f": {because}" if because else ""),
        exit_code=ExitCode.RUN_FAILED,
        kind="run",
        where=where,
        fix=what_next(status["run"], status["exit"]),
        evidence=status.get("evidence"),
    )
