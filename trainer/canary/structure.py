"""Was it really done that way? Compiles under the gate, private code objects, graphs, memory, progress."""

from __future__ import annotations

from collections import Counter

from trainer.canary.evidence import Check, Evidence, Outcome
from trainer.canary.gate import GateRecord
from trainer.compile import CompileEvent

_FRAME = "DYNAMO"
_MEMORY_STEPS = 3
_GROWTH_BYTES = 1 << 20


def judge_structure(record: GateRecord, evidence: Evidence) -> None:
    """Add the checks that need no reference."""
    _moved(record, evidence)
    if not record.parts.strategy.compiles:
        why = f"strategy {record.parts.strategy.name} compiles nothing"
        for name in ("compile_gate", "code_objects", "recompiles"):
            evidence.add(Check(name, None, Outcome.NOT_CHECKED, why))
    else:
        _compile_gate(record, evidence)
        if record.failure is None:
            _code_objects(record, evidence)
            _recompiles(record, evidence)
    if record.failure is None:
        _graphs(record, evidence)
        _memory(record, evidence)


def _moved(record: GateRecord, evidence: Evidence) -> None:
    wanted = record.parts.settings.workload.canary_steps
    for worker, done in enumerate(record.steps_done):
        outcome = Outcome.PASS if done == wanted else Outcome.FAIL
        evidence.add(Check("moved", worker, outcome, f"{done} of {wanted} steps", {"steps": done}))


def _compile_gate(record: GateRecord, evidence: Evidence) -> None:
    before = record.compiles if record.steady_from is None else record.compiles[: record.steady_from]
    outside = [event for event in before if event.holder is None]
    if outside:
        first = outside[0]
        summary = (
            f"{len(outside)} of {len(before)} compiles began outside the gate, the first ({first.trigger} "
            f"{first.compile_id}) in {first.thread}: compile and capture one worker at a time"
        )
        evidence.add(Check("compile_gate", None, Outcome.FAIL, summary, {"outside": len(outside)}))
        return
    evidence.add(Check("compile_gate", None, Outcome.PASS, f"{len(before)} compiles, all under the gate"))


def _code_objects(record: GateRecord, evidence: Evidence) -> None:
    """Dynamo numbers code objects: the first compile of each is `N/0`. Every worker needs its own for each bucket."""
    frames = [event for event in record.compiles if event.trigger == _FRAME]
    uses = Counter(_frame(event) for event in frames)
    # the step and the hidden states
    wanted = 2 * len(record.parts.settings.workload.buckets)
    for worker in range(len(record.workers)):
        own = {_frame(event) for event in frames if event.holder == f"drafter-{worker}"}
        alone = {frame for frame in own if uses[frame] == 1}
        good = len(alone) >= wanted
        summary = f"{len(alone)} code objects of its own" + ("" if good else f", {wanted} needed: it runs another's")
        figures = {"own": len(alone), "needed": wanted}
        evidence.add(Check("code_objects", worker, Outcome.PASS if good else Outcome.FAIL, summary, figures))


def _frame(event: CompileEvent) -> str:
    return event.compile_id.partition("/")[0]


def _recompiles(record: GateRecord, evidence: Evidence) -> None:
    late = record.compiles[record.steady_from or 0 :]
    outcome = Outcome.FAIL if late else Outcome.PASS
    summary = f"{len(late)} compiles in the steady phase" + (f", in {late[0].thread}" if late else "")
    evidence.add(Check("recompiles", None, outcome, summary, {"compiles": len(late)}))


def _graphs(record: GateRecord, evidence: Evidence) -> None:
    parts, work = record.parts, record.parts.settings.workload
    devices = [each for each in parts.placement.drafters if parts.strategy.uses_graphs(each)]
    if not devices or record.graphs is None:
        why = "no drafter is on CUDA" if parts.strategy.graphs else f"strategy {parts.strategy.name} uses no graphs"
        evidence.add(Check("cuda_graphs", None, Outcome.NOT_CHECKED, why))
        return
    opened, ended = record.graphs
    for index, workers in sorted(Counter(each.index or 0 for each in devices).items()):
        # the step's, and those of the forward that shows the hidden states
        step = parts.strategy.replays_per_step(work.accumulation, work.drafter_threads)
        hidden = parts.strategy.replays_per_call * work.accumulation
        wanted = workers * work.canary_steps * (step + hidden)
        replays = ended.replays.get(index, 0) - opened.replays.get(index, 0)
        captures = ended.captures.get(index, 0) - opened.captures.get(index, 0)
        good = replays >= wanted and captures == 0 and opened.captures.get(index, 0) > 0
        summary = f"cuda:{index}: {replays} replays (at least {wanted} needed), {captures} captures in the steady phase"
        figures = {"replays": replays, "needed": wanted, "late_captures": captures}
        evidence.add(Check("cuda_graphs", None, Outcome.PASS if good else Outcome.FAIL, summary, figures))


def _memory(record: GateRecord, evidence: Evidence) -> None:
    """The first step allocates the optimiser's state; from then on nothing may grow."""
    seen = record.allocated
    if not seen or not seen[0]:
        evidence.add(Check("memory", None, Outcome.NOT_CHECKED, "no drafter is on CUDA"))
        return
    if len(seen) < _MEMORY_STEPS:
        summary = f"needs {_MEMORY_STEPS} steps, workload.canary_steps is {len(seen)}"
        evidence.add(Check("memory", None, Outcome.NOT_CHECKED, summary))
        return
    for index in sorted(seen[0]):
        growth = seen[-1][index] - seen[0][index]
        outcome = Outcome.PASS if growth <= _GROWTH_BYTES else Outcome.FAIL
        summary = f"cuda:{index}: {growth} bytes more after step {len(seen)} than after step 1"
        figures = {"growth_bytes": growth, "allowed_bytes": _GROWTH_BYTES}
        evidence.add(Check("memory", None, outcome, summary, figures))
