"""Was it really done that way? Compiles under the gate, private code objects, graphs, memory, progress."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

from trainer.canary.evidence import Check, Evidence, Outcome
from trainer.canary.gate import GateRecord
from trainer.compile import CompileEvent, GraphCounts

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


def own_code_objects(events: Sequence[CompileEvent], worker: str) -> int:
    """How many code objects `worker` compiled, inside the gate, that nobody else did.

    Dynamo numbers code objects: the first compile of each is `N/0`. Who runs another's compiles nothing.
    """
    holders: dict[str, set[str]] = {}
    for event in events:
        if event.trigger == _FRAME and event.holder is not None:
            holders.setdefault(_frame(event), set()).add(event.holder)
    return sum(each == {worker} for each in holders.values())


def replays_by_step(counts: Sequence[GraphCounts], device: int) -> list[int]:
    """The replays on CUDA device `device` between each of `counts` and the next."""
    seen = [each.replays.get(device, 0) for each in counts]
    return [after - before for before, after in itertools.pairwise(seen)]


def _moved(record: GateRecord, evidence: Evidence) -> None:
    wanted = record.parts.settings.workload.canary_steps
    for worker, done in enumerate(record.steps_done):
        outcome = Outcome.PASS if done == wanted else Outcome.FAIL
        evidence.add(Check("moved", worker, outcome, f"{done} of {wanted} steps", {"steps": done}))


def _compile_gate(record: GateRecord, evidence: Evidence) -> None:
    before = record.compiles if record.steady_from is None else record.compiles[: record.steady_from]
    # whoever holds the gate may not cover for another that compiles meanwhile
    outside = [event for event in before if event.holder != event.thread]
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
    """Every worker needs its own for each bucket, of the step and of the hidden states."""
    wanted = 2 * len(record.parts.settings.workload.buckets)
    for worker in range(len(record.workers)):
        own = own_code_objects(record.compiles, f"drafter-{worker}")
        good = own >= wanted
        summary = f"{own} code objects of its own" + ("" if good else f", {wanted} needed: it runs another's")
        figures = {"own": own, "needed": wanted}
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
    if not devices:
        why = "no drafter is on CUDA" if parts.strategy.graphs else f"strategy {parts.strategy.name} uses no graphs"
        for name in ("cuda_graphs", "graph_pools"):
            evidence.add(Check(name, None, Outcome.NOT_CHECKED, why))
        return
    counts = record.graphs
    for index, workers in sorted(Counter(each.index or 0 for each in devices).items()):
        # the step's, and those of the forward that shows the hidden states
        step = parts.strategy.replays_per_step(work.accumulation, work.drafter_threads)
        wanted = workers * (step + parts.strategy.replays_per_call * work.accumulation)
        replays = replays_by_step(counts, index)
        off = [each for each in replays if each != wanted]
        captures = counts[-1].captures.get(index, 0) - counts[0].captures.get(index, 0)
        good = not off and captures == 0 and counts[0].captures.get(index, 0) > 0
        summary = f"cuda:{index}: {wanted} replays a step needed, {off[0] if off else wanted} found" + (
            f" in step {replays.index(off[0]) + 1}" if off else f" in each of {len(replays)}"
        )
        summary += f"; {captures} captures in the steady phase"
        figures = {"replays": sum(replays), "needed": wanted * len(replays), "late_captures": captures}
        evidence.add(Check("cuda_graphs", None, Outcome.PASS if good else Outcome.FAIL, summary, figures))
        if not counts[0].captures.get(index, 0):
            evidence.add(Check("graph_pools", None, Outcome.NOT_CHECKED, f"cuda:{index}: no graph was captured"))
            continue
        pools = record.pools.get(index, 0)
        summary = f"cuda:{index}: {pools} private pools of graphs for {workers} drafters"
        outcome = Outcome.PASS if pools >= workers else Outcome.FAIL
        evidence.add(Check("graph_pools", None, outcome, summary, {"pools": pools, "needed": workers}))
    used = {each.index or 0 for each in devices}
    for index in sorted(set(record.pools) - used):
        summary = f"cuda:{index}: {record.pools[index]} private pools, and no drafter is there: set_device was left out"
        evidence.add(Check("graph_pools", None, Outcome.FAIL, summary, {"pools": record.pools[index], "needed": 0}))


def _memory(record: GateRecord, evidence: Evidence) -> None:
    """After the first step all is allocated that the gate needs, the reference's part included; then nothing grows."""
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
