"""The playbook's environment on the host: made there, or found made; its Python is the trainer's from then on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_ops.config import Playbook
from dflash_ops.config.environment import lock_text
from dflash_ops.deploy.amounts import number
from dflash_ops.deploy.assets import bring, look_at
from dflash_ops.deploy.doctor import Diagnosis, Level, refuse_blockers
from dflash_ops.deploy.events import Events
from dflash_ops.deploy.session import Session
from dflash_ops.errors import ExitCode, OpsError
from dflash_ops.transport import Conversation

WHEELS = "wheels"
Ask = Callable[[dict[str, Any]], dict[str, Any]]
"""Sends the request `environment` with these arguments and shows what it tells."""


@dataclass(frozen=True)
class HostEnvironment:
    """As the host tells of it. `python` is None while it is not made; `packages`: those of the lock."""

    digest: str
    python: str | None
    packages: dict[str, str]
    reused: bool
    building: bool
    complaints: tuple[str, ...]

    @classmethod
    def of(cls, answer: dict[str, Any]) -> HostEnvironment:
        return cls(
            str(answer["digest"]),
            None if answer["python"] is None else str(answer["python"]),
            {str(name): str(version) for name, version in answer["packages"].items()},
            bool(answer["reused"]),
            bool(answer["building"]),
            tuple(str(line) for line in answer["complaints"]),
        )


def environment_arguments(session: Session, playbook: Playbook, wheels: str | None, **more: object) -> dict[str, Any]:
    """Raises OpsError (exit 2) where the lock is gone since the playbook was read."""
    section, variables = playbook.environment, session.variables.of_pip
    assert section is not None
    try:
        text = lock_text(Path(section.lock))
    except (OSError, ValueError) as error:
        raise OpsError(
            f"the lock cannot be read: {error}",
            exit_code=ExitCode.USAGE,
            kind="environment",
            where=section.lock,
            fix="put it back, or correct `environment.lock` in the playbook",
        ) from error
    return {
        "python": session.python,
        "lock": text,
        "wheels": wheels,
        "version": section.python,
        "timeout_s": section.timeout_s,
        "user": session.host.job_user,
        "environment": variables.plain,
        "secrets": variables.secrets,
        **more,
    }


def is_asked_at_once(playbook: Playbook) -> bool:
    """Whether there is nothing to be brought before it can be made."""
    section = playbook.environment
    return section is not None and (section.wheels is None or section.wheels.upload is None)


def at_once(session: Session, playbook: Playbook) -> dict[str, Any]:
    """The arguments where `is_asked_at_once`."""
    section = playbook.environment
    return environment_arguments(session, playbook, section.wheels.path if section and section.wheels else None)


def make_environment(
    session: Session, conversation: Conversation, playbook: Playbook, events: Events, ask: Ask
) -> HostEnvironment:
    """Wheels are brought only where it is not there yet. Raises OpsError (exit 5) with the reason and what to do."""
    section = playbook.environment
    assert section is not None
    if is_asked_at_once(playbook) or section.wheels is None:
        return HostEnvironment.of(ask(at_once(session, playbook)))
    there = HostEnvironment.of(ask(environment_arguments(session, playbook, None, dry_run=True)))
    wheels = None
    if there.python is None:
        found = bring(conversation, WHEELS, section.wheels, events)
        refuse_blockers([found.diagnosis], session.host.name)
        wheels = None if found.asset is None else found.asset.path
    return HostEnvironment.of(ask(environment_arguments(session, playbook, wheels)))


def look_at_environment(
    session: Session, conversation: Conversation, playbook: Playbook, events: Events
) -> tuple[HostEnvironment | None, list[Diagnosis]]:
    """For the doctor: changes nothing there. None where the playbook names none, or it could not be made."""
    section = playbook.environment
    if section is None:
        return None, []
    on_host = section.wheels.path if section.wheels is not None else None
    try:
        asked = environment_arguments(session, playbook, on_host, dry_run=True)
        found = HostEnvironment.of(conversation.request("environment", asked))
    except OpsError as error:
        if error.exit_code is not ExitCode.BLOCKED:
            raise
        return None, [Diagnosis(Level.BLOCKER, "host", error.what, error.fix)]
    if found.python is not None:
        return found, diagnoses(found)
    doing = "is being made there now" if found.building else "is not there yet: the next deploy makes it"
    what = f"environment {found.digest[:12]} ({number(len(found.packages), 'package')} of {section.lock}) {doing}"
    said = [Diagnosis(Level.OK, "host", what)]
    if section.wheels is not None and section.wheels.upload is not None:
        said.append(look_at(conversation, WHEELS, section.wheels, events).diagnosis)
    return found, said


def diagnoses(found: HostEnvironment) -> list[Diagnosis]:
    """What `pip check` said of it: a lock may know better than the packages do."""
    fix = "add it to what the lock is made of, or leave it where the trainer does without"
    return [Diagnosis(Level.WARNING, "trainer", f"pip check: {line}", fix) for line in found.complaints]
