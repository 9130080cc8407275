"""The canary's order of events."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path

from trainer.abort import Abort
from trainer.canary.controls import run_controls
from trainer.canary.definition import judge_definition
from trainer.canary.evidence import Check, Evidence, Outcome
from trainer.canary.gate import GateRecord, run_gate
from trainer.canary.health import judge_health
from trainer.canary.leftover import Leftover, give_back
from trainer.canary.out_of_memory import explained
from trainer.canary.rehearsal import rehearse, save_and_load
from trainer.canary.rows import judge_rows
from trainer.canary.structure import judge_structure
from trainer.canary.throughput import Throughput, judge_throughput
from trainer.canary.watchdog import Watchdog, told_to
from trainer.collector import paused_collector
from trainer.compile import Gate
from trainer.errors import WorkerFailed, told_whole
from trainer.parts import Parts
from trainer.settings import Settings
from trainer.tune.table import choose


def run_canary(settings: Settings, out: Path) -> int:
    """Prove the workload on this machine: `evidence.json` last, in `out`; returns 0 (pass), 6 (fail) or 7.

    Raises `InputError` where the settings are refused, which is no verdict. A hang ends the process with code 6 after
    `workload.canary_timeout_s`.
    """
    choice = choose(settings)
    settings = choice.settings
    evidence = Evidence(out, {"strategy": settings.workload.strategy, "tuning": choice.table})
    with paused_collector(), Watchdog("canary", settings.workload.canary_timeout_s, told_to(evidence)):
        left = Leftover()
        speed: Throughput | None = None
        with evidence.timed("gate"):
            record = prove(settings, evidence)
        left.follow(record)
        if record.failure is None:
            save_and_load(record, out / "gate", evidence)
            parts = record.parts
            # its replicas make room for those that are timed
            give_back(record.workers)
            del record
            if evidence.outcome is Outcome.PASS:
                with evidence.timed("throughput"):
                    speed = _timed(parts, evidence)
                left.allow(len(parts.placement.drafters))
            del parts
            evidence.add(left.check())
        if evidence.outcome is Outcome.PASS:
            with evidence.timed("rehearsal"):
                rehearse(settings, out / "rehearsal", evidence)
        if evidence.outcome is Outcome.PASS and speed is not None:
            speed.keep()
        return evidence.write(_passed(settings, evidence))


def _timed(parts: Parts, evidence: Evidence) -> Throughput | None:
    """Steady steps, and the state of the GPUs while they are still hot."""
    try:
        speed = judge_throughput(parts, evidence)
    except WorkerFailed as failed:
        why = explained(failed, parts.settings) or told_whole(failed)
        evidence.add(Check("throughput", None, Outcome.FAIL, why))
        return None
    judge_health([*parts.placement.drafters, *chain(*parts.placement.target_groups)], evidence)
    return speed


def prove(settings: Settings, evidence: Evidence) -> GateRecord:
    """The gate, its structure and its numbers. Raises `InputError`."""
    judge_definition(settings.workload.block_size, evidence)
    record = run_gate(settings)
    judge_rows(record.parts, evidence)
    _failures(record, settings, evidence)
    judge_structure(record, evidence)
    for check in record.findings:
        evidence.add(check)
    if record.failure is None:
        with evidence.blaming_process("the process died in a control of the canary's own"):
            for check in _controls(record.parts):
                evidence.add(check)
    return record


def _controls(parts: Parts) -> list[Check]:
    """In a thread, where Dynamo compiles for workers too: in the main one it lost objects of the interpreter.

    Seen with torch 2.11 on Python 3.12, in three of several hundred canaries, and never in a thread.
    """
    gate = Gate(1, Abort())
    with ThreadPoolExecutor(1, thread_name_prefix="controls") as pool:
        return pool.submit(run_controls, parts, gate).result()


def _failures(record: GateRecord, settings: Settings, evidence: Evidence) -> None:
    if record.failure is not None:
        worker = int(record.failure.worker.rpartition("-")[2])
        why = explained(record.failure, settings) or told_whole(record.failure)
        evidence.add(Check("worker", worker, Outcome.FAIL, why))
    for name in record.hung:
        summary = f"{name} did not end after another worker had failed"
        evidence.add(Check("worker", int(name.rpartition("-")[2]), Outcome.FAIL, summary))


def _passed(settings: Settings, evidence: Evidence) -> str:
    work = settings.workload
    gradients = [check.figures["worst"] for check in evidence.checks if check.id == "gradients"]
    unchecked = sorted({check.id for check in evidence.checks if check.outcome is Outcome.NOT_CHECKED})
    summary = (
        f"{work.drafter_threads} drafters, strategy {work.strategy}, {work.canary_steps} steps: "
        f"gradients within {max(gradients, default=0.0):.1e} of eager; {work.rehearsal_steps} steps rehearsed"
    )
    return summary + (f"; not checked: {', '.join(unchecked)}" if unchecked else "")
