"""Takes a fault through the real thing: build, static check, canary; and says what stopped it.

Standard library and `dflash_ops.release` only: it runs on a GPU box that has nothing but the trainer's packages.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from dflash_ops.release import Finding, Release, Source, build, check
from tests.regressions.fault import Check, Fault, Rule

ROOT = Path(__file__).resolve().parents[2]
Json = dict[str, Any]
FORKSERVER = Path(__file__).with_name("forkserver.py")
# more than the canary's own watchdog waits
GRACE_S = 60
# docs/trainer-contract.md
_REFUSED = 2


def build_with(patches: list[Path], out: Path) -> Release:
    """What `dflash-ops build` makes of the project's trainer and a playbook's `patches`."""
    return build(
        Source(ROOT / "trainer", bundled=not (ROOT / ".git").exists()), patches, settings={"module": "trainer"}, out=out
    )


def findings_of(release: Release) -> list[Finding]:
    """What `dflash-ops check` says of it, without what the trainer itself allows with a reason."""
    return [finding for finding in check(release.tree, python=None) if finding.suppressed is None]


@dataclass(frozen=True)
class Canary:
    """How one canary ended. `evidence` is None where it wrote none.

    `broke`: why a first process had to be set aside, None where there was one only.
    """

    code: int
    evidence: Json | None
    log: str
    seconds: float
    broke: str | None = None

    def of(self, *outcomes: str) -> list[Json]:
        """The checks that ended so."""
        checks = [] if self.evidence is None else self.evidence["checks"]
        return [each for each in checks if each["outcome"] in outcomes]

    @property
    def bad(self) -> list[Json]:
        """The checks that stop a launch."""
        return self.of("fail", "inconclusive")

    @property
    def stops(self) -> bool:
        """Whether a deploy ends here: anything but a pass, said by code and evidence."""
        return self.code != 0 or self.evidence is None or self.evidence["outcome"] != "pass"

    @property
    def refused(self) -> bool:
        """Whether the settings were refused, which is no verdict on the trainer."""
        return self.code == _REFUSED

    @property
    def message(self) -> str:
        """What a person reads first."""
        if self.evidence is None:
            lines = self.log.strip().splitlines() or [""]
            fatal = next((line for line in lines if line.startswith("Fatal Python error")), lines[-1])
            return f"exit code {self.code} without evidence: {fatal}"
        return str(self.evidence["summary"])


Run = Callable[[Path, list[str], Path, int], int]
"""Runs `python -m trainer ARGUMENTS` in a release's root, its output into a file, so many seconds; the exit code."""


def run_canary(run: Run, root: Path, settings: Mapping[str, Any], work: Path) -> Canary:
    """The canary of the release at `root`, below the empty folder `work`; a second one where its process broke."""
    file = work / "settings.json"
    file.write_text(json.dumps(settings))
    limit_s = int(settings["workload"]["canary_timeout_s"]) + GRACE_S

    def once(out: Path, log: Path) -> Canary:
        out.mkdir()
        started = time.monotonic()
        code = run(root, ["canary", "--settings", str(file), "--out", str(out)], log, limit_s)
        seconds = time.monotonic() - started
        evidence = out / "evidence.json"
        found = json.loads(evidence.read_text()) if evidence.exists() else None
        return Canary(code, found, log.read_text(errors="replace"), seconds)

    first = once(work / "out", work / "log.txt")
    broke = (first.evidence or {}).get("again")
    if broke is None:
        return first
    return dataclasses.replace(once(work / "out-2", work / "log-2.txt"), broke=broke)


class OwnProcess:
    """Runs a trainer in a process of its own, as the agent does on a host, on the given CPUs.

    `gpus`: what CUDA_VISIBLE_DEVICES names there; None: as it is here.
    """

    def __init__(self, cpus: Sequence[int], gpus: Sequence[str] | None = None) -> None:
        self._cpus = cpus
        self._gpus = gpus

    def __call__(self, root: Path, arguments: list[str], log: Path, limit_s: int) -> int:
        """See `Run`."""
        environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1", "HF_HUB_OFFLINE": "1"}
        if self._gpus is not None:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(self._gpus)
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "trainer", *arguments],
                cwd=root, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip
        os.sched_setaffinity(process.pid, self._cpus)
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()


class ForkServer:
    """Runs trainers in forks of one process that has imported torch: see forkserver.py. On a CPU."""

    def __init__(self) -> None:
        environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "HF_HUB_OFFLINE": "1"}
        self._process = subprocess.Popen(
            [sys.executable, str(FORKSERVER)],
            env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._answer()

    def __call__(self, root: Path, arguments: list[str], log: Path, limit_s: int) -> int:
        """See `Run`."""
        request = {"root": str(root), "arguments": arguments, "log": str(log), "limit_s": limit_s}
        stream = self._pipe(self._process.stdin)
        stream.write(json.dumps(request) + "\n")
        stream.flush()
        return int(self._answer()["code"])

    def close(self) -> None:
        """No more requests."""
        self._pipe(self._process.stdin).close()
        self._process.wait()

    def _answer(self) -> Json:
        line = self._pipe(self._process.stdout).readline()
        if not line:
            raise RuntimeError(f"the fork server ended with code {self._process.wait()}")
        answer: Json = json.loads(line)
        return answer

    @staticmethod
    def _pipe(stream: IO[str] | None) -> IO[str]:
        assert stream is not None
        return stream


def wrong_in_check(rule: Rule | None, findings: list[Finding]) -> str | None:
    """Where the static check does not say what `rule` promises (None: it says nothing); None where it does."""
    said = sorted({finding.rule for finding in findings})
    if rule is None:
        return f"no rule should find anything, {', '.join(said)} did" if said else None
    mine = [finding for finding in findings if finding.rule == rule.id]
    if not any(rule.says in finding.why for finding in mine):
        return f"rule {rule.id} does not say {rule.says!r}: {[finding.why for finding in findings]}"
    if any(finding.blocks for finding in findings) == rule.warns:
        return f"rule {rule.id} {'stops' if rule.warns else 'does not stop'} the build"
    if rule.alone and said != [rule.id]:
        return f"rule {rule.id} is not alone: {', '.join(said)}"
    return None


def wrong_in_canary(expected: Check, canary: Canary) -> str | None:
    """Where the canary does not say what `expected` promises; None where it does."""
    if not canary.stops:
        return f"the canary passes: {canary.message}"
    if expected.dies and canary.evidence is None and canary.code < 0:
        return None
    said = canary.bad
    mine = [each for each in said if each["id"] in {expected.id, *expected.races}]
    if not any(expected.says in each["summary"] and each["outcome"] == expected.outcome for each in mine):
        told = [f"{each['id']}: {each['summary'].splitlines()[-1]}" for each in said] or [canary.message]
        return f"check {expected.id} does not say {expected.says!r}: {told}"
    names = sorted({str(each["id"]) for each in said})
    if expected.alone and names != [expected.id]:
        return f"check {expected.id} is not alone: {', '.join(names)}"
    return None


def settings_for(fault: Fault | None, base: Mapping[str, Any]) -> Json:
    """The settings of a fault's canary: `base` with the fault's own workload."""
    own = {} if fault is None else fault.workload
    return {**base, "workload": {**base["workload"], **own}}
