"""Every worker's numbers against the eager reference: outputs, loss, gradients, exchange, parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.canary.evidence import Check, Evidence, Outcome
from trainer.canary.gate import RULE, GateRecord
from trainer.canary.measure import Distance, compare, relative, tolerance, worst
from trainer.canary.reference import Eager, StepReference, sum_gradients
from trainer.canary.witness import Named, StepRecord, WorkerRecord

_CONTROL_ERROR = 1.25
_CONTROL_PARAMETER = "fc.weight"


@dataclass(frozen=True)
class _Pair:
    """One worker's step: the truth (float64), and plain eager code in the worker's dtype."""

    truth: StepReference
    plain: StepReference


def judge_numbers(record: GateRecord, evidence: Evidence) -> None:
    """Add a check of each kind for each worker, and the negative control."""
    dtype = record.parts.dtype
    pairs = _references(record)
    steps = range(len(pairs[0]))
    truth = [sum_gradients([pairs[w][s].truth.gradient for w in range(len(pairs))], torch.float64) for s in steps]
    plain = [sum_gradients([pairs[w][s].plain.gradient for w in range(len(pairs))], dtype) for s in steps]
    # causes before their consequences: one wrong gradient makes every exchanged one wrong
    for worker, seen in enumerate(record.workers):
        mine = pairs[worker]
        _report(evidence, "outputs", worker, (_outputs(seen.steps[s], mine[s], dtype) for s in steps))
        _report(evidence, "loss", worker, (_losses(seen.steps[s], mine[s], dtype) for s in steps))
        _report(evidence, "gradients", worker, (_gradients(seen.steps[s].own, mine[s], dtype) for s in steps))
    for worker, seen in enumerate(record.workers):
        exchanged = (compare(seen.steps[s].exchanged, plain[s], truth[s], dtype) for s in steps)
        _report(evidence, "exchange", worker, exchanged)
        _report(evidence, "parameters", worker, [_parameters(seen)])
        _same_bits(evidence, worker, record.workers)
    _negative_control(evidence, record.workers[-1].steps[0], pairs[-1][0], dtype)


def _references(record: GateRecord) -> list[list[_Pair]]:
    """By worker and step, one after the other, each on its worker's device."""
    parts = record.parts
    micros = parts.settings.workload.accumulation
    steps = parts.settings.workload.canary_steps
    weights = [
        sum(batch.weight_sum for worker in record.workers for batch in worker.batches[s * micros : (s + 1) * micros])
        for s in range(steps)
    ]
    pairs = []
    for device, worker in zip(parts.placement.drafters, record.workers, strict=True):
        frozen = parts.frozen[device]
        both: list[list[StepReference]] = []
        for dtype in (torch.float64, parts.dtype):
            eager = Eager(parts.drafter, frozen, dtype)
            both.append(
                [
                    eager.step(seen.before, worker.batches[s * micros : (s + 1) * micros], 1.0 / weights[s])
                    for s, seen in enumerate(worker.steps)
                ]
            )
        pairs.append([_Pair(*each) for each in zip(*both, strict=True)])
    return pairs


def _outputs(seen: StepRecord, pair: _Pair, dtype: torch.dtype) -> list[Distance]:
    return [
        Distance("hidden states", relative(found, truth), tolerance(relative(plain, truth), dtype))
        for found, plain, truth in zip(seen.hidden, pair.plain.hidden, pair.truth.hidden, strict=True)
    ]


def _losses(seen: StepRecord, pair: _Pair, dtype: torch.dtype) -> list[Distance]:
    numbers: Callable[[float], Tensor] = lambda value: torch.tensor(value, dtype=torch.float64)  # noqa: E731
    return [
        Distance(
            "loss",
            relative(numbers(found), numbers(truth)),
            tolerance(relative(numbers(plain), numbers(truth)), dtype),
        )
        for found, plain, truth in zip(seen.loss_sums, pair.plain.loss_sums, pair.truth.loss_sums, strict=True)
    ]


def _gradients(own: Named, pair: _Pair, dtype: torch.dtype) -> list[Distance]:
    return compare(own, pair.plain.gradient, pair.truth.gradient, dtype)


def _parameters(seen: WorkerRecord) -> list[Distance]:
    """After all steps, against AdamW written out, fed with the gradients that the exchange gave this worker.

    Relative to how far each parameter moved. The float32 values are compared: the master copies under bfloat16.
    """
    assert seen.replica is not None
    start = seen.steps[0].before
    gradients = [step.exchanged for step in seen.steps]
    truth = RULE.train(start, gradients, torch.float64)
    plain = RULE.train(start, gradients, torch.float32)
    state = seen.replica.optimizer.state_tensors()
    distances = []
    for name, parameter in seen.replica.drafter.named_parameters():
        master = state.get(f"master.{name}", parameter.detach())
        if not torch.equal(master.to(parameter.dtype), parameter.detach()):
            distances.append(Distance(f"{name} (is not its master copy)", float("inf"), 0.0))
        moved = truth[name] - start[name].double()
        noise = relative(plain[name], truth[name], moved)
        distances.append(Distance(name, relative(master.cpu(), truth[name], moved), tolerance(noise, torch.float32)))
    return distances


def _same_bits(evidence: Evidence, worker: int, records: list[WorkerRecord]) -> None:
    first, own = records[0].replica, records[worker].replica
    assert first is not None and own is not None
    others = dict(first.drafter.named_parameters())
    differ = [name for name, each in own.drafter.named_parameters() if not torch.equal(each.cpu(), others[name].cpu())]
    summary = (
        f"{differ[0]} differs from the first replica's" if differ else "every parameter equals the first replica's"
    )
    outcome = Outcome.FAIL if differ else Outcome.PASS
    evidence.add(Check("replicas", worker, outcome, summary, {"different": len(differ)}))


def _report(evidence: Evidence, name: str, worker: int, steps: Iterable[list[Distance]]) -> None:
    """One check over all steps: the tensor that uses most of its tolerance, by name."""
    found = [worst(distances) for distances in steps]
    step = max(range(len(found)), key=lambda index: found[index].share)
    most = found[step]
    where = "" if len(found) == 1 else f" at step {step + 1}"
    summary = f"worst in {most.name}{where}: {most.worst:.1e} relative, {most.allowed:.1e} allowed"
    figures = {"worst": most.worst, "tolerance": most.allowed, "step": step + 1}
    evidence.add(Check(name, worker, Outcome.PASS if most.good else Outcome.FAIL, summary, figures))


def _negative_control(evidence: Evidence, seen: StepRecord, pair: _Pair, dtype: torch.dtype) -> None:
    """One worker's gradient of one parameter, made wrong: a comparison that does not notice proves nothing."""
    wrong = {**seen.own, _CONTROL_PARAMETER: seen.own[_CONTROL_PARAMETER] * _CONTROL_ERROR}
    found = {each.name: each for each in _gradients(wrong, pair, dtype)}[_CONTROL_PARAMETER]
    outcome = Outcome.INCONCLUSIVE if found.good else Outcome.PASS
    noticed = "not noticed" if found.good else "noticed"
    summary = f"{_CONTROL_PARAMETER} made wrong by a quarter: {noticed}"
    figures = {"worst": found.worst, "tolerance": found.allowed}
    evidence.add(Check("negative_control", None, outcome, summary, figures))
