"""Is every fault stopped on this machine? `python benchmarks/regressions.py NAME [--jobs N] [--clean N] [FAULT ...]`.

Builds the trainer with each patch of tests/regressions that this machine can show (on a GPU: all that concern CUDA; or
the ones named), runs its real canary, `--jobs` of them side by side, and keeps in benchmarks/results/NAME what stopped
each, and its words. A fault's canary runs on as many GPUs as the table says, no more: two threads that share none may
have nothing to fight over. `--clean N` runs N canaries of the trainer as it is, on all GPUs, and counts false alarms.
Exits with 1 where a fault was not stopped, or a clean canary was.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from claims import RESULTS, ROOT, sources_digest

sys.path.insert(0, str(ROOT))

import torch

from tests.regressions.fault import Fault
from tests.regressions.faults import FAULTS
from tests.regressions.harness import (
    Canary,
    OwnProcess,
    build_with,
    findings_of,
    run_canary,
    settings_for,
    wrong_in_canary,
    wrong_in_check,
)
from tests.regressions.workload import prepared_settings

SOURCES = [
    "trainer",
    "dflash_ops/release",
    "tests/regressions",
    *(fault.patch.relative_to(ROOT).as_posix() for fault in FAULTS),
]
CUDA = torch.cuda.is_available()
# as CUDA_VISIBLE_DEVICES names them
_NAMED = [each for each in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if each]
GPUS = _NAMED or [str(index) for index in range(torch.cuda.device_count())]


@dataclass(frozen=True)
class Row:
    """One canary, on so many `gpus`. `fault` is None for a clean one; `unlike` says where it ended otherwise than the
    table says. `broke`: why its first process was set aside (None: there was one only).
    """

    fault: str | None
    gpus: int
    rules: list[str]
    outcome: str
    checks: list[str]
    message: str
    seconds: float
    good: bool
    unlike: str | None
    broke: str | None


@dataclass(frozen=True)
class _Slot:
    """Room for one canary: CPUs of its own, and the GPUs, those first that few others begin with."""

    cpus: list[int]
    gpus: list[str]


class Bench:
    """The folder of one measurement, and the machine's CPUs dealt out to `jobs` canaries at a time."""

    def __init__(self, work: Path, out: Path, jobs: int) -> None:
        self._work, self._out, self._jobs = work, out, jobs
        cpus = sorted(os.sched_getaffinity(0))
        self._slots: queue.Queue[_Slot] = queue.Queue()
        for index in range(jobs):
            first = index % len(GPUS) if GPUS else 0
            self._slots.put(_Slot(cpus[index::jobs] or cpus, [*GPUS[first:], *GPUS[:first]]))
        self.rows: list[Row] = []
        self._clean = build_with([], work / "clean" / "tree")
        self._base = prepared_settings(OwnProcess(cpus), self._clean.tree, work / "workload", cuda=CUDA)

    def clean(self, number: int) -> None:
        """One canary of the trainer as it is."""
        name = f"clean-{number}"
        canary = self._canary(name, self._clean.tree, self._base, len(GPUS))
        self._keep(_row(None, len(GPUS), [], canary, good=not canary.stops, unlike=None), name, canary)

    def fault(self, fault: Fault) -> None:
        """Build, static check and canary of one fault."""
        release = build_with([fault.patch], self._work / fault.name / "tree")
        findings = findings_of(release)
        expected = fault.cuda if CUDA else fault.cpu
        canary = self._canary(fault.name, release.tree, settings_for(fault, self._base), fault.gpus)
        unlike = wrong_in_check(fault.rule, findings)
        if unlike is None and expected is not None:
            unlike = wrong_in_canary(expected, canary)
        rules = sorted({finding.rule for finding in findings})
        good = (canary.stops and not canary.refused) or any(finding.blocks for finding in findings)
        gpus = fault.gpus if CUDA else 0
        self._keep(_row(fault.name, gpus, rules, canary, good=good, unlike=unlike), fault.name, canary)

    def _canary(self, name: str, root: Path, settings: dict[str, Any], gpus: int) -> Canary:
        work = self._work / name / "canary"
        work.mkdir(parents=True)
        slot = self._slots.get()
        try:
            return run_canary(OwnProcess(slot.cpus, slot.gpus[:gpus]), root, settings, work)
        finally:
            self._slots.put(slot)
            for out in work.glob("out*"):
                shutil.rmtree(out, ignore_errors=True)

    def _keep(self, row: Row, name: str, canary: Canary) -> None:
        self.rows.append(row)
        print(
            f"{'ok ' if row.good else 'BAD'} {name}: {row.outcome} {', '.join(row.checks)} {row.unlike or ''}",
            flush=True,
        )
        if not row.good or row.unlike:
            (self._out / "logs").mkdir(exist_ok=True)
            (self._out / "logs" / f"{name}.txt").write_text(canary.log)

    def side_by_side(self, calls: Sequence[Callable[[], None]]) -> None:
        """All of them, `jobs` at a time; the first error of the bench itself (not of a canary) is raised."""
        with ThreadPoolExecutor(self._jobs) as pool:
            for done in [pool.submit(call) for call in calls]:
                done.result()


def _row(fault: str | None, gpus: int, rules: list[str], canary: Canary, *, good: bool, unlike: str | None) -> Row:
    return Row(
        fault=fault,
        gpus=gpus,
        rules=rules,
        outcome="no evidence" if canary.evidence is None else str(canary.evidence["outcome"]),
        checks=sorted({str(each["id"]) for each in canary.bad}),
        message=canary.message,
        seconds=round(canary.seconds, 1),
        good=good,
        unlike=unlike,
        broke=canary.broke,
    )


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description="Is every fault stopped on this machine?")
    parser.add_argument("name")
    parser.add_argument("faults", nargs="*", metavar="FAULT")
    parser.add_argument("--jobs", type=int, default=4, help="canaries side by side")
    parser.add_argument("--clean", type=int, default=0, metavar="N", help="canaries without a fault")
    arguments = parser.parse_intermixed_args()
    chosen = _chosen(arguments.faults)
    out = RESULTS / arguments.name
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), out, arguments.jobs)
        # alone and first: it fills the cache of compiled code, and without it nothing else says anything
        bench.clean(0)
        if bench.rows[0].good:
            bench.side_by_side(
                [
                    *[lambda fault=fault: bench.fault(fault) for fault in chosen],
                    *[lambda number=number: bench.clean(number) for number in range(1, arguments.clean + 1)],
                ]
            )
    _write(out, bench.rows, time.monotonic() - started)
    sys.exit(0 if all(row.good for row in bench.rows) else 1)


def _chosen(names: Sequence[str]) -> list[Fault]:
    known = {fault.name: fault for fault in FAULTS}
    if unknown := [name for name in names if name not in known]:
        sys.exit(f"no such fault: {', '.join(unknown)}; known are {', '.join(known)}")
    if few := [name for name in names if not _here(known[name])]:
        sys.exit(f"this machine cannot show {', '.join(few)}: see tests/regressions/README.md")
    return [known[name] for name in names] or [fault for fault in FAULTS if _here(fault)]


def _here(fault: Fault) -> bool:
    return 0 < fault.gpus <= len(GPUS) if CUDA else fault.cpu is not None


def _write(out: Path, rows: Sequence[Row], seconds: float) -> None:
    faults, clean = [row for row in rows if row.fault is not None], [row for row in rows if row.fault is None]
    (out / "regressions.json").write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")
    lines = ["| fault | GPUs | stopped | rules | canary | checks | message | s |", "|---|---|---|---|---|---|---|---|"]
    lines += [
        f"| `{row.fault}` | {row.gpus} | {'yes' if row.good else '**no**'} | {', '.join(row.rules)} | {row.outcome} "
        f"| {', '.join(row.checks)} | {_cell(row.message)} | {row.seconds} |"
        for row in faults
    ]
    told = [f"* `{row.fault}`: {_cell(row.unlike)}" for row in faults if row.unlike]
    alarms = [f"* {_cell(row.message)}" for row in clean if not row.good]
    broke = [f"* `{row.fault or 'clean'}`: {_cell(row.broke)}" for row in rows if row.broke]
    text = [
        f"# Faults, {time.strftime('%Y-%m-%d')}, {_device()}, torch {torch.__version__}",
        "",
        f"{sum(row.good for row in faults)} of {len(faults)} faults stopped, "
        f"{len(alarms)} false alarms in {len(clean)} clean canaries, {seconds:.0f} s in all.",
        "",
        *lines,
        *(["", "Stopped otherwise than tests/regressions/README.md says:", "", *told] if told else []),
        *(["", "False alarms:", "", *alarms] if alarms else []),
        *(["", "In a second process, since the first one broke:", "", *broke] if broke else []),
    ]
    (out / "regressions.md").write_text("\n".join(text) + "\n")
    figures = {
        "faults": len(faults),
        "stopped": sum(row.good for row in faults),
        "clean": len(clean),
        "false_alarms": len(alarms),
        "second_processes": len(broke),
        "seconds": round(seconds),
    }
    claim = {
        "date": time.strftime("%Y-%m-%d"),
        "gpu": _device(),
        "torch": torch.__version__,
        "command": shlex.join(["python", "benchmarks/regressions.py", *sys.argv[1:]]),
        "figures": figures,
        "sources": SOURCES,
        "digest": sources_digest(SOURCES),
    }
    (out / "claim.json").write_text(json.dumps(claim, indent=2) + "\n")
    print(json.dumps(figures))


def _device() -> str:
    return torch.cuda.get_device_name() if CUDA else "no GPU"


def _cell(text: str | None) -> str:
    return (text or "").replace("|", "\\|").replace("\n", " ")[:300]


if __name__ == "__main__":
    main()
