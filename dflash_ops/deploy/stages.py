"""The stages that happen on the host, in order, inside one conversation."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from dflash_ops.config import Playbook
from dflash_ops.deploy.assets import HostAsset, as_arguments, bring_assets, examine_assets, resolved
from dflash_ops.deploy.doctor import Diagnosis, examine_trainer, refuse_blockers
from dflash_ops.deploy.environments import HostEnvironment, at_once, diagnoses, is_asked_at_once, make_environment
from dflash_ops.deploy.events import Events
from dflash_ops.deploy.examining import Subject, examine, footprint_arguments, probe_arguments
from dflash_ops.deploy.lines import LineSplitter, gist
from dflash_ops.deploy.naming import DIGITS, HOW, WORDS
from dflash_ops.deploy.pushing import push
from dflash_ops.deploy.session import Facts, Session, facts, owner
from dflash_ops.errors import ExitCode, OpsError, TransportError
from dflash_ops.release import Release
from dflash_ops.transport import Conversation
from dflash_ops.transport.messages import nonsense

SECONDS_PER_HOUR = 3600


@dataclass
class Stages:
    """One release on its way to one host, inside one conversation that holds the host's lock."""

    session: Session
    conversation: Conversation
    playbook: Playbook
    events: Events

    def __post_init__(self) -> None:
        self.prepared: str | None = None
        self.release = ""
        self.lock_token: str | None = None
        self.manifest: dict[str, Any] | None = None
        """Of a release that was built here."""
        self.python = self.session.python
        """The trainer's: the host's own, or that of the environment that was made for it."""
        self._environment: HostEnvironment | None = None
        self._needs: dict[str, Any] | None = None
        self._made_before: str | None = None
        self._untuned: dict[str, Any] | None = None
        self._assets: dict[str, HostAsset] = {}

    @cached_property
    def facts(self) -> Facts:
        return facts(self.conversation)

    @property
    def _where(self) -> str:
        return self.session.host.name

    def lock(self, command: str) -> None:
        """Raises OpsError (exit 9) that names the holder."""
        known = self.facts
        self.lock_token = self.conversation.request("lock", _lock_arguments(command)).get("token")
        self.events.emit("connected", host=self._where, hostname=known.hostname, workdir=known.workdir)

    def ask_ahead(self, release: Release, command: str, *, free: bool, verdict: bool) -> None:
        """Sends what will be asked up to the verdict in one go: one round trip instead of ten. The stages ask as ever.

        Each is skipped by the host unless all before it succeeded. `free`, `verdict`: whether those will be asked.
        """
        self.release = release.digest
        ask = self.conversation.ahead
        ask("facts")
        ask("lock", _lock_arguments(command))
        if self.session.pusher is not None:
            # whether there is anything to push is in the facts
            return
        ask("stage", _stage_arguments(release), upload=release.archive)
        ask("syntax", self._syntax_arguments())
        ask("activate", {"digest": release.digest})
        if self.playbook.environment is not None:
            # which Python answers the rest is known once it is there
            if is_asked_at_once(self.playbook):
                ask("environment", at_once(self.session, self.playbook))
            return
        ask("probe", probe_arguments(self.session, self.python))
        ask("footprint", footprint_arguments(self.playbook, prepares=command == "prepare"))
        ask("holders")
        if self.playbook.assets:
            # where they lie on the host is part of the settings
            return
        ask("check", self._check_arguments())
        if free:
            ask("free", self._verb_arguments())
        if verdict:
            ask("verdict", self._verb_arguments())

    def stage(self, release: Release) -> None:
        """Brings the release there, unless the host has it; verified file by file, parsed by the host's python."""
        self.manifest = release.manifest.to_dict()
        pusher = self.session.pusher
        pushed = 0
        if pusher is not None and release.digest not in self.facts.raw["releases"]:
            pushed = push(self.conversation, release, pusher)
        result = self.conversation.request("stage", _stage_arguments(release), upload=release.archive)
        sent = len(release.archive) if result["sent"] or pushed else 0
        self.events.emit("staged", release=release.digest, sent=sent)
        self.use(release.digest)

    def keep_assets(self, assets: Mapping[str, Mapping[str, str]]) -> None:
        """Those of a run that goes on: its settings name their paths already, the host looks at them again."""
        self._assets = {name: HostAsset(**asset) for name, asset in assets.items()}

    def named(self, name: str) -> str:
        """The digest of a release on the host: `current`, `previous`, or the beginning of one (8 digits at least).

        Raises OpsError (exit 2) that names those that are there.
        """
        there = self.facts.raw["releases"]
        if name in WORDS:
            found = [digest for digest in there if digest == self.facts.raw[name]]
        else:
            found = [digest for digest in there if len(name) >= DIGITS and digest.startswith(name)]
        if len(found) == 1:
            return str(found[0])
        known = ", ".join(digest[:12] for digest in there) or "no release at all"
        raise OpsError(
            f"{name!r} {_misnamed(name, found)}; there: {known}",
            exit_code=ExitCode.USAGE,
            kind="unknown_release",
            where=self._where,
            fix=HOW,
        )

    def use(self, digest: str) -> None:
        """Makes a release that is there the current one, once the host's python has parsed it."""
        self.release = digest
        answer = self.conversation.request("syntax", self._syntax_arguments())
        self.conversation.request("activate", {"digest": digest})
        self.events.emit("activated", release=digest, files=answer["files"])

    def _syntax_arguments(self) -> dict[str, object]:
        return {"digest": self.release, "python": self.session.python}

    def environment(self) -> None:
        """Makes the environment that the playbook names, or finds it made. Raises OpsError (exit 5)."""
        if self.playbook.environment is None:
            return

        def ask(arguments: dict[str, Any]) -> dict[str, Any]:
            return self._verb("environment", arguments)

        found = make_environment(self.session, self.conversation, self.playbook, self.events, ask)
        self._environment = found
        self._use_python(found.python, found.digest, reused=found.reused)

    def keep_environment(self, python: str, digest: str) -> None:
        """That of a run that goes on: the host has kept it."""
        self._use_python(python, digest, reused=True)

    def _use_python(self, python: str | None, digest: str, *, reused: bool) -> None:
        self.python = str(python)
        self.events.emit("environment", environment=digest, python=self.python, reused=reused)

    def doctor(self, *, prepares: bool = False) -> None:
        """Host, GPUs and the trainer's own check. Raises OpsError (exit 5) that names the first blocker.

        `prepares`: for a run that makes data, and no checkpoints.
        """
        assets = examine_assets(self.conversation, self.playbook, self.events)
        subject = Subject(self.playbook, self.python, assets, prepares=prepares)
        found = examine(self.session, self.conversation, self.facts, subject)
        if self._environment is not None:
            found += diagnoses(self._environment)
        self._report(found)
        sent = bring_assets(self.conversation, self.playbook, self.events, assets)
        self._report([one.diagnosis for one in sent.values()])
        assets |= sent
        self._assets |= {name: one.asset for name, one in assets.items() if one.asset is not None}
        self.events.emit("asking", what="the trainer for its own check (the first import takes a minute)")
        try:
            answer = self._verb("check", self._check_arguments())
        except OpsError as error:
            if error.exit_code is not ExitCode.RUN_FAILED:
                raise
            # a trainer that cannot even check (a missing package, say) is the host's matter, not a run's
            raise OpsError(
                error.what,
                exit_code=ExitCode.BLOCKED,
                kind="doctor",
                where=f"{self._where}, trainer",
                fix=error.fix
                or f"give {self.python} there the trainer's packages (the wheel with its extra `trainer`)",
                evidence=error.evidence,
            ) from error
        self._report(examine_trainer(answer))
        self._needs, self._made_before = answer.get("prepare"), answer.get("prepared")
        self._untuned = answer.get("tune")

    def _report(self, found: list[Diagnosis]) -> None:
        for one in found:
            self.events.emit("diagnosis", **one.as_event())
        refuse_blockers(found, self._where)

    def refuse_busy(self) -> None:
        """A live run on one of the devices stops a deploy before minutes are spent on it. Raises OpsError (exit 8)."""
        self.conversation.request("free", self._verb_arguments())

    def prepare(self) -> None:
        """Makes the data that the trainer asked for, or finds it made."""
        key = self.to_prepare()
        if key is None:
            return
        more = {"key": key, "timeout_s": self.playbook.run.prepare_timeout_s}
        result = self._verb("prepare", {**self._verb_arguments(), **more})
        self.prepared = str(result["path"])
        self.events.emit("prepared", path=self.prepared, reused=result["reused"])

    def to_prepare(self) -> str | None:
        """The key of the data that the trainer asked for; None where it needs none, or the host has them."""
        if self._needs is None:
            return None
        if self._made_before is not None:
            self.prepared = self._made_before
            self.events.emit("prepared", path=self.prepared, reused=True)
            return None
        self.events.emit("preparing", why=self._needs["why"])
        return str(self._needs["key"])

    def tune(self, *, again: bool = False) -> dict[str, Any] | None:
        """Measures every strategy where the trainer's check asked for it, or `again`: the table, else None.

        What `auto` means may be another one then: see `refuse_untuned` and `canary`.
        """
        if self._untuned is None and not again:
            return None
        self.events.emit("tuning", why=self._untuned["why"] if self._untuned else "asked for")
        more = {"timeout_s": self.playbook.run.tune_timeout_s}
        table = self._verb("tune", {**self._verb_arguments(prepared=self.prepared), **more}).get("tuning")
        if not isinstance(table, dict):
            raise nonsense("no table of strategies", self._where)
        self.events.emit("tuned", table=table)
        return table

    def canary(self, name: str, *, again: str | None = None) -> dict[str, Any]:
        """The verdict for exactly this release, environment, workload and these devices; `name` is the canary's.

        One that still holds is reused, unless there is a reason to run it `again`. It may say fail or inconclusive: see
        `refuse_verdict`.
        """
        if again is None:
            answer = self.conversation.request("verdict", self._verb_arguments())
            if answer["holds"] and answer["verdict"]["outcome"] == "pass":
                self.events.emit("verdict", reused=True, why=answer["why"], **self._told(answer["verdict"]))
                return dict(answer["verdict"])
            self.events.emit("canary", why=answer["why"])
        else:
            self.events.emit("canary", why=again)
        more = {"name": name, "timeout_s": self.playbook.workload.canary_timeout_s + CANARY_SLACK_S}
        verdict = self._verb("canary", {**self._verb_arguments(prepared=self.prepared), **more})["verdict"]
        self.events.emit("verdict", reused=False, why="", **self._told(verdict))
        return dict(verdict)

    def launch(
        self,
        run: str,
        *,
        reason: str | None,
        policy: dict[str, Any],
        parent: str | None = None,
        key: str | None = None,
    ) -> dict[str, Any]:
        """Starts the run under its supervisor. The host's gate decides, not this side.

        `key`: of the data that the run is to prepare; None where it is to train.
        """
        policy = {**policy, "shared_gpus": self.session.host.shared_gpus}
        told = {"reason": reason, "policy": policy, "parent": parent, "notify": self.session.notify, "key": key}
        more = {**told, "timeout_s": LAUNCH_TIMEOUT_S}
        result = self._verb("launch", {**self._verb_arguments(run, self.prepared), "run": run, **more})
        told = {"unit": result.get("unit"), "skipped_canary": reason, "prepares": result.get("prepares")}
        self.events.emit("launched", run=run, host=self._where, **told)
        return result

    def free_lock(self) -> None:
        """The run has begun: following it needs no lock. Where the link is broken the host frees it by itself."""
        with suppress(TransportError):
            self.conversation.request("free_lock")

    def _check_arguments(self) -> dict[str, object]:
        return {**self._verb_arguments(), "timeout_s": self.playbook.run.check_timeout_s}

    def _verb_arguments(self, run: str | None = None, prepared: str | None = None) -> dict[str, object]:
        return {
            "digest": self.release,
            "module": self.playbook.trainer.module,
            "python": self.python,
            "playbook": self.playbook.name,
            "user": self.session.host.job_user,
            "environment": self.session.variables.of_jobs.plain,
            "secrets": self.session.variables.of_jobs.secrets,
            "shared_gpus": self.session.host.shared_gpus,
            "max_age_s": self.playbook.run.canary_max_age_h * SECONDS_PER_HOUR,
            "assets": as_arguments(self._assets),
            # the host sets the cache itself
            "settings": resolved(self.playbook.settings(run=run, prepared=prepared, cache=""), self._assets),
        }

    def _verb(self, op: str, arguments: dict[str, object]) -> dict[str, Any]:
        lines = LineSplitter(lambda line: self.events.emit("log", source=op, line=line))
        try:
            return self.conversation.request(
                op, arguments, on_event=self._tell, on_data=lambda stream, data: lines.feed(data)
            )
        finally:
            lines.close()

    def _told(self, verdict: dict[str, Any]) -> dict[str, Any]:
        evidence = verdict.get("evidence") or {}
        return {
            **{key: verdict[key] for key in ("outcome", "binding", "made", "playbook")},
            "summary": evidence.get("summary", ""),
            "checks": evidence.get("checks", []),
            "log": f"{self.facts.workdir}/{verdict['log']}",
        }

    def _tell(self, event: dict[str, Any]) -> None:
        if event["event"] == "building":
            told = {key: event[key] for key in ("environment", "packages", "begun")}
            self.events.emit("building", host=self._where, **told)
        if event["event"] == "again":
            self.events.emit("canary", why=f"once more, in a new process: {event['why']}")


def _lock_arguments(command: str) -> dict[str, object]:
    return {"owner": owner(), "command": command}


def _stage_arguments(release: Release) -> dict[str, object]:
    sha256 = hashlib.sha256(release.archive).hexdigest()
    return {"digest": release.digest, "size": len(release.archive), "sha256": sha256}


def _misnamed(name: str, found: list[str]) -> str:
    if name in WORDS:
        return "is no release that is there"
    if found:
        return f"names {len(found)} releases"
    return "is too short to name a release" if 0 < len(name) < DIGITS else "names no release there"


CANARY_SLACK_S = 120
"""The host's deadline lies behind the trainer's own watchdog, which can say more."""
LAUNCH_TIMEOUT_S = 60


def refuse_verdict(verdict: dict[str, Any], where: str, folder: Path) -> None:
    """Raises OpsError unless the verdict is a pass: exit 6 when it failed, 7 when it cannot tell.

    `folder`: where the verdict is kept here.
    """
    outcome = verdict["outcome"]
    if outcome == "pass":
        return
    evidence = verdict.get("evidence") or {}
    summary = gist(str(evidence.get("summary") or "no evidence"))
    failed = outcome == "fail"
    raise OpsError(
        f"the canary {'failed' if failed else 'cannot tell'}: {summary}",
        exit_code=ExitCode.CANARY_FAILED if failed else ExitCode.INCONCLUSIVE,
        kind="canary",
        where=where,
        fix=f"nothing was launched; the evidence is above and in {folder / 'verdict.json'}"
        if failed
        else "nothing was launched; run the same command again",
        evidence=evidence,
    )


def refuse_untuned(table: dict[str, Any], where: str) -> None:
    """Raises OpsError (exit 6) where no strategy of the table is right."""
    if table.get("fastest") is not None:
        return
    raise OpsError(
        "no strategy computes the right numbers here",
        exit_code=ExitCode.CANARY_FAILED,
        kind="tuning",
        where=where,
        fix="nothing was launched; the log above says why each of them failed",
        evidence=table,
    )
