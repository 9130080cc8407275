"""Going on with a run that has ended: a child of it, with its settings, from its last whole checkpoint or its data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from dflash_ops.config import ConfigError, Playbook, load_playbook
from dflash_ops.config.document import Document, KeyPath
from dflash_ops.config.errors import Problem
from dflash_ops.config.overrides import override
from dflash_ops.config.translate import validated
from dflash_ops.deploy.building import built, checked
from dflash_ops.deploy.deploying import Choices, Outcome, launch, proven, see_to_the_end
from dflash_ops.deploy.events import Events
from dflash_ops.deploy.lost_lock import telling_a_lost_lock
from dflash_ops.deploy.preparing import begin
from dflash_ops.deploy.session import Session
from dflash_ops.deploy.stages import SECONDS_PER_HOUR, Stages
from dflash_ops.errors import ExitCode, OpsError
from dflash_ops.release import Release
from dflash_ops.transport import Conversation
from dflash_ops.transport.messages import nonsense

CHANGEABLE = ("training", "run")


@dataclass(frozen=True)
class Wish:
    """`run` None: the latest. `sets`: `key=value` of `--set`. `playbook`: whose release is built anew; None: the run's
    own release is used."""

    run: str | None
    sets: Sequence[str] = ()
    playbook: str | None = None


class Continued(Playbook):
    """A playbook made of a run's own settings: what they do not name is left to its release, which has the defaults."""

    def settings(self, run: str | None, prepared: str | None, cache: str) -> dict[str, Any]:
        known = super().settings(run, prepared, cache)
        named = self.model_dump(mode="json", include={"workload", "training"}, exclude_unset=True)
        return {**known, **named}


@dataclass(frozen=True)
class Point:
    """What the host says of the run (docs/agent-protocol.md, `resumable`)."""

    run: str
    state: str
    release: str
    checkpoint: str | None
    """None for a run that prepares data: it goes on from what lies in their folder."""
    step: int
    raw: dict[str, Any]

    @property
    def trains(self) -> bool:
        return self.checkpoint is not None

    @classmethod
    def ask(cls, conversation: Conversation, run: str | None, events: Events, where: str) -> Point:
        """Raises OpsError: it goes on, or has no whole checkpoint."""
        raw = conversation.request(
            "resumable",
            {"run": run},
            on_event=lambda event: events.emit("damaged", path=event["path"], why=event["why"]),
        )
        point = cls.of(raw, where)
        came = {"checkpoint": point.checkpoint, "step": point.step, "prepares": raw.get("prepares")}
        events.emit("resuming", run=point.run, state=point.state, **came)
        return point

    @classmethod
    def of(cls, raw: dict[str, Any], where: str) -> Point:
        """Raises TransportError for an answer that is none."""
        settings = raw.get("settings")
        sections = [settings.get(name) for name in ("workload", "training")] if isinstance(settings, dict) else [None]
        where_from = "checkpoint" if raw.get("prepares") is None else "prepares"
        texts = [raw.get(name) for name in ("run", "state", "release", "module", where_from)]
        tables = [*sections, raw.get("policy"), raw.get("assets")]
        numbers = [raw.get("step"), raw.get("max_age_s")]
        good = all(isinstance(text, str) for text in texts) and all(isinstance(table, dict) for table in tables)
        if not good or not all(isinstance(number, int | float) for number in numbers):
            raise nonsense("no answer about a run to go on with", where)
        checkpoint = None if where_from == "prepares" else raw["checkpoint"]
        return cls(raw["run"], raw["state"], raw["release"], checkpoint, int(raw["step"]), raw)

    def playbook(self, sets: Sequence[str], rebuilt: Playbook | None) -> Continued:
        """`rebuilt`: whose release is built anew; None: the run's own is used, of which only its module is known.

        Raises ConfigError for what `sets` may not change, OpsError where nothing is left to do.
        """
        settings = self.raw["settings"]
        training = settings["training"]
        if self.trains:
            # what it began with is in its checkpoint
            training = {**_without(training, "init_from"), "resume_from": self.checkpoint}
        data = {
            "version": 1,
            "name": self.raw.get("playbook") or "resumed",
            # a release may be any trainer's: only what is known to be the bundled one is asked for its packages
            "trainer": {
                "source": rebuilt.trainer.source if rebuilt else f"release {self.release}",
                "module": rebuilt.trainer.module if rebuilt else self.raw["module"],
            },
            "workload": settings["workload"],
            "training": training,
            "run": {"canary_max_age_h": self.raw["max_age_s"] / SECONDS_PER_HOUR},
        }
        if rebuilt is not None and rebuilt.environment is not None:
            data["environment"] = rebuilt.environment.model_dump(exclude_none=True)
        changed = override(Document(f"settings of run {self.run}", data, {}), sets, Playbook)
        wrong = [_unchangeable(path) for path in changed.origins if not _may_change(path)]
        if wrong:
            raise ConfigError(wrong)
        made = validated(Continued, changed.data, changed.locate)
        if self.trains and made.training.steps <= self.step:
            raise OpsError(
                f"run {self.run} is {self.state} and its checkpoint is at step {self.step} of {made.training.steps}: "
                "nothing is left to do",
                exit_code=ExitCode.USAGE,
                kind="nothing_left",
                where="training.steps",
                fix=f"ask for more: `dflash-ops resume {self.run} --set steps=N`, N over {self.step}",
            )
        return made

    def policy(self, playbook: Continued) -> dict[str, Any]:
        """The run's own, with what was set in section `run` now."""
        asked = playbook.run.policy()
        return {**self.raw["policy"], **{key: asked[key] for key in asked if key in playbook.run.model_fields_set}}


def _may_change(path: KeyPath) -> bool:
    return path[0] in CHANGEABLE and path not in (("training", "resume_from"), ("training", "init_from"))


def _without(table: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in table.items() if name != key}


def _unchangeable(path: KeyPath) -> Problem:
    name = ".".join(map(str, path))
    hint = (
        "it is the run's last whole checkpoint"
        if path[-1] in ("resume_from", "init_from")
        else "a resumed run keeps its workload; for another one: dflash-ops deploy"
    )
    return Problem(f"--set {name}", None, "cannot be changed for a resumed run", hint)


def resume(session: Session, wish: Wish, events: Events, choices: Choices, outcome: Outcome) -> None:
    """As `deploy`, without a build unless it is wished for; as `prepare` for a run that prepares data.

    Raises OpsError with the exit code of the stage.
    """
    # a secret that cannot be read stops the command before anything is built or reached
    _ = session.variables, session.notify
    with session.conversation() as conversation:
        point = Point.ask(conversation, wish.run, events, session.host.name)
        outcome.parent = point.run
        if not point.trains:
            _refuse_canary(point, choices)
        with _release(wish, events) as (release, rebuilt):
            playbook = point.playbook(wish.sets, rebuilt)
            policy = point.policy(playbook)
            outcome.release = point.release if release is None else release.digest
            stages = Stages(session, conversation, playbook, events)
            stages.keep_assets(point.raw["assets"])
            stages.lock("resume")
            if release is None:
                _use_its_own(stages, point)
            else:
                stages.stage(release)
                stages.environment()
            preparing = None
            with telling_a_lost_lock(stages, outcome):
                if point.trains:
                    with proven(stages, choices, outcome, "resume") as (run, folder):
                        launch(stages, run, choices, outcome, policy=policy)
                else:
                    preparing = begin(stages, policy, choices, outcome)
    if point.trains:
        see_to_the_end(session, run, folder, choices, outcome, policy=policy)
    elif preparing is not None:
        preparing.see_to_the_end(session, choices, outcome)


def _refuse_canary(point: Point, choices: Choices) -> None:
    if choices.again or choices.skip_reason is not None:
        raise OpsError(
            f"run {point.run} prepares data: there is no canary to run again or to skip",
            exit_code=ExitCode.USAGE,
            kind="usage",
            where="--again, --skip-canary",
            fix=f"leave them out: `dflash-ops resume {point.run}`",
        )


def _use_its_own(stages: Stages, point: Point) -> None:
    """Release and managed environment; an existing one is the host's `python` as it is now."""
    try:
        stages.use(point.release)
    except OpsError as error:
        if error.kind == "unknown_release":
            error.fix = f"build one anew: `dflash-ops resume {point.run} --release --playbook NAME`"
        raise
    managed, python = point.raw.get("managed"), point.raw.get("python")
    if isinstance(managed, str) and isinstance(python, str):
        stages.keep_environment(python, managed)


@contextmanager
def _release(wish: Wish, events: Events) -> Iterator[tuple[Release | None, Playbook | None]]:
    """The release to build anew and its playbook; None where the run's own is used."""
    if wish.playbook is None:
        yield None, None
        return
    playbook = load_playbook(wish.playbook)
    with built(playbook, events) as release:
        checked(release, events)
        yield release, playbook
