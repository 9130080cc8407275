"""Verdicts: what each is bound to, where it lies, and whether it holds."""

from __future__ import annotations

import enum
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Tuple

from .accounts import Account
from .auto import choices
from .beside import beside
from .environments import ManagedEnvironment
from .errors import AgentError, ExitCode
from .files import digest_of, read_json, write_json
from .jobs import Job
from .processes import boot_id, boottime_s
from .pythons import Environment, probe
from .releases import damage
from .workdir import WorkDir


class Outcome(str, enum.Enum):
    PASS = "pass"  # noqa: S105
    FAIL = "fail"
    INCONCLUSIVE = "inconclusive"


_WORDS = {
    "release": "another release",
    "module": "another trainer module",
    "environment": "another python or other packages",
    "workload": "another workload",
    "tuning": "another choice of strategy `auto`",
    "variables": "other environment variables",
    "target": "another content of the target",
    "devices": "other devices",
    "driver": "another driver",
    "boot_id": "an earlier boot",
}


@dataclass(frozen=True)
class Binding:
    """All that a verdict depends on, as the agent itself sees it; digests are sha256 in hex.

    `tuning`: what `auto` means here, by the kept tables (auto.py); empty where a strategy is named.
    """

    release: str
    module: str
    environment: str
    workload: str
    tuning: Dict[str, str]
    variables: Dict[str, Optional[str]]
    target: str
    devices: List[str]
    driver: Optional[str]
    boot_id: str

    @property
    def digest(self) -> str:
        return digest_of(asdict(self))

    def differences(self, other: Dict[str, Any]) -> List[str]:
        """In words, what `other` was bound to instead."""
        return [words for name, words in _WORDS.items() if other.get(name) != getattr(self, name)]


def target_identity(target: str) -> str:
    """What lies at the workload's target now: a digest over name, size and modification time of its files.

    A target inside an installed package is told by the environment's package versions already.
    """
    root = Path(target)
    if not root.is_absolute():
        return ""
    files = sorted(path for path in root.rglob("*") if path.is_file()) if root.is_dir() else [root]
    seen = []
    for path in files:
        try:
            status = path.stat()
        except OSError:
            continue
        seen.append([str(path), status.st_size, status.st_mtime_ns])
    return digest_of({"files": seen})


Look = Callable[[str, Optional[Account]], Environment]


def stamp(work: WorkDir, job: Job, look: Look = probe) -> Binding:
    """The binding of a job now: the staged tree hashed again, the environment looked at again.

    AgentError `tampered`.
    """
    return stamp_with_environment(work, job, look)[0]


def stamp_with_environment(work: WorkDir, job: Job, look: Look = probe) -> Tuple[Binding, Environment]:
    """As `stamp`, with what its `environment` is the digest of."""
    looking = beside(lambda: look(job.python, job.account))
    why = damage(job.release, job.digest)
    if why is not None:
        raise AgentError(
            "tampered",
            f"release {job.digest[:12]}… is not what was staged: {why}",
            str(job.release),
            "deploy again: it is staged anew, and proven anew",
            ExitCode.CANARY_INCONCLUSIVE,
        )
    installed = looking()
    binding = Binding(
        job.digest,
        job.module,
        installed.digest if job.managed is None else _still(job.managed, installed),
        digest_of(job.workload),
        choices(work, job.workload),
        job.variables.described(),
        target_identity(str(job.workload.get("target", ""))),
        job.devices.names,
        job.devices.driver,
        boot_id(),
    )
    return binding, installed


def _still(managed: ManagedEnvironment, installed: Environment) -> str:
    """The digest of an environment that is what was built. AgentError `tampered`."""
    why = managed.damage()
    if installed.version != managed.marker.get("version"):
        why = f"its Python is {installed.version} now"
    elif installed.packages != managed.marker.get("packages"):
        why = "other packages are in it now"
    if why is not None:
        raise AgentError(
            "tampered",
            f"environment {managed.digest[:12]}… is not what was built: {why}",
            str(managed.folder),
            "deploy again: it is built anew, and proven anew",
            ExitCode.CANARY_INCONCLUSIVE,
        )
    return managed.digest


@dataclass(frozen=True)
class Verdict:
    """`made` is Unix time for people; `boottime_s` (CLOCK_BOOTTIME) is what its age is counted from."""

    outcome: Outcome
    binding: Dict[str, Any]
    digest: str
    made: float
    boottime_s: float
    max_age_s: float
    evidence: Dict[str, Any]
    log: str
    playbook: Optional[str]

    @classmethod
    def make(
        cls,
        outcome: Outcome,
        binding: Binding,
        max_age_s: float,
        evidence: Dict[str, Any],
        *,
        log: str,
        playbook: Optional[str],
    ) -> "Verdict":
        now, since_boot = time.time(), boottime_s()
        return cls(outcome, asdict(binding), binding.digest, now, since_boot, max_age_s, evidence, log, playbook)

    @classmethod
    def from_json(cls, value: Dict[str, Any]) -> "Verdict":
        fields = {name: value[name] for name in cls.__dataclass_fields__ if name != "outcome"}
        for name in ("made", "boottime_s", "max_age_s"):
            fields[name] = float(fields[name])
        if not isinstance(fields["evidence"], dict) or not isinstance(fields["binding"], dict):
            raise TypeError("evidence and binding are objects")
        return cls(outcome=Outcome(value["outcome"]), **fields)

    def to_json(self) -> Dict[str, Any]:
        return {"v": 1, **asdict(self), "outcome": self.outcome.value}

    @property
    def age_s(self) -> float:
        return boottime_s() - self.boottime_s

    def is_old(self, max_age_s: float) -> bool:
        """Over the limit it was made with or over `max_age_s`, or from a boot-time clock that has not come yet."""
        return not 0 <= self.age_s < min(self.max_age_s, max_age_s)

    @property
    def summary(self) -> str:
        return str(self.evidence.get("summary", "no summary"))


@dataclass(frozen=True)
class VerdictStore:
    """verdicts/<binding digest>.json: the last verdict for each binding; beside it `.begun` while its canary runs.

    A canary that was begun and never decided leaves its `.begun`: the gate sees no verdict then, since somebody doubted
    the old one, and nobody knows what the new one would have been. The old one stays for what launches nothing.
    """

    folder: Path

    @classmethod
    def of(cls, work: WorkDir) -> "VerdictStore":
        return cls(work.verdicts)

    def _path(self, digest: str) -> Path:
        return self.folder / f"{digest}.json"

    def _begun(self, digest: str) -> Path:
        return self.folder / f"{digest}.begun"

    def begin(self, binding: Binding) -> None:
        """From here until `put` or `withdraw` there is no verdict for this binding: not after a kill, nor a reboot."""
        about = {"release": binding.release, "devices": binding.devices}
        write_json(self._begun(binding.digest), {"v": 1, "time": time.time(), **about})

    def put(self, verdict: Verdict) -> None:
        write_json(self._path(verdict.digest), verdict.to_json())
        self._begun(verdict.digest).unlink(missing_ok=True)

    def withdraw(self, binding: Binding) -> None:
        self._path(binding.digest).unlink(missing_ok=True)
        self._begun(binding.digest).unlink(missing_ok=True)

    def last(self, binding: Binding) -> Optional[Verdict]:
        if self.is_undecided(binding):
            return None
        return self._load(self._path(binding.digest), asdict(binding))

    def is_undecided(self, binding: Binding) -> bool:
        """Whether its canary was begun and has not decided."""
        return os.path.lexists(self._begun(binding.digest))

    def undecided_on(self, release: str, devices: List[str]) -> Optional[float]:
        """When (Unix time) the last canary of this release on exactly these devices began that has not decided."""
        found = [value for path in self.folder.glob("*.begun") for value in [read_json(path)] if value is not None]
        times = [one.get("time") for one in found if one.get("release") == release and one.get("devices") == devices]
        return max((float(one) for one in times if isinstance(one, (int, float))), default=None)

    def all(self) -> List[Verdict]:
        """Newest first."""
        found = [self._load(path, None) for path in self.folder.glob("*.json")]
        kept = [verdict for verdict in found if verdict is not None]
        return sorted(kept, key=lambda verdict: verdict.made, reverse=True)

    def nearest(self, binding: Binding) -> Optional[Verdict]:
        """The passing verdict that differs from `binding` in the fewest parts, the newest of them."""
        passes = [verdict for verdict in self.all() if verdict.outcome is Outcome.PASS]
        return min(passes, key=lambda item: (len(binding.differences(item.binding)), -item.made), default=None)

    @staticmethod
    def _load(path: Path, binding: Optional[Dict[str, Any]]) -> Optional[Verdict]:
        """A verdict that can be read and whose binding is the one its name stands for; anything else is none."""
        value = read_json(path)
        if value is None:
            return None
        try:
            verdict = Verdict.from_json(value)
        except (KeyError, TypeError, ValueError):
            return None
        if digest_of(verdict.binding) != path.stem or (binding is not None and verdict.binding != binding):
            return None
        return verdict
