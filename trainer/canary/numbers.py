"""Every worker's numbers against the eager reference, step by step while all workers stand still."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from trainer.canary.diagnose import candidates, explain
from trainer.canary.evidence import Check, Outcome
from trainer.canary.measure import Distance, compare, relative, tolerance, worst
from trainer.canary.noise import HIDDEN, LOSS, Noise, number
from trainer.canary.perturbation import perturbed_gradient
from trainer.canary.reference import GROUP, Eager, Order, StepReference
from trainer.canary.update import State, host_state, judge_update
from trainer.canary.witness import Named, StepRecord, WorkerRecord
from trainer.parts import Parts
from trainer.step import Batch

_TOO_LARGE = (
    "the reference found no room beside the workers: it needs 16 bytes a parameter and 8 an entry of the head; free "
    "the GPU of others, or take fewer drafter_threads on it, a smaller batch_size, or fewer draft_layers"
)

_NUDGES = 4
"""References with inputs off by a rounding, where 8-bit numbers are multiplied and a distance is too large."""


class _Worst:
    """Of one check and worker, over the steps so far: the tensor that uses most of its tolerance."""

    def __init__(self) -> None:
        self._most: Distance | None = None
        self._step = 0
        self._note = ""

    def take(self, step: int, distances: list[Distance], note: str = "") -> bool:
        """Whether all distances of `step` (from 0) are within their tolerances."""
        most = worst(distances)
        if self._most is None or most.share > self._most.share:
            self._most, self._step, self._note = most, step, note
        return most.good

    def check(self, name: str, worker: int) -> Check:
        """The finding."""
        most = self._most
        assert most is not None
        summary = (
            f"worst in {most.name} at step {self._step + 1}: {most.worst:.1e} relative, {most.allowed:.1e} allowed"
        )
        figures = {"worst": most.worst, "tolerance": most.allowed, "step": self._step + 1}
        outcome = Outcome.PASS if most.good else Outcome.FAIL
        return Check(name, worker, outcome, summary + (f"; {self._note}" if self._note else ""), figures)


class NumbersJudge:
    """Judges outputs, loss, gradients, exchange and update of all workers, for one step at a time.

    Host memory, in bytes a parameter: 12 once (the state before the step; 6 without master weights), and each worker's
    gradients before the exchange in its dtype. After a step that is wrong no other is judged.
    """

    def __init__(self, parts: Parts, workers: Sequence[WorkerRecord]) -> None:
        self._parts = parts
        self._workers = workers
        self._micros = parts.settings.workload.accumulation
        self._state: State = {}
        self._found: dict[tuple[str, int], _Worst] = {}
        self._noise: dict[torch.device, Noise] = {}
        self._control: Check | None = None
        self._trouble: Check | None = None
        self._judged = 0
        self._ended = False

    def begin_step(self) -> None:
        """Keep what the next step starts from. The replicas are equal bit for bit: one copy stands for all."""
        if not self._ended:
            self._state = host_state(self._workers[0])

    def end(self) -> None:
        """Judge no more: the replicas differ, and what one of them starts from says nothing about another."""
        self._ended = True
        self._state = {}

    def judge(self, step: int, differ: Collection[int]) -> None:
        """All workers' step `step` (from 0), which they have just taken. `differ`: those not equal to the first one."""
        if self._ended:
            return
        try:
            good = self._judge(step, differ)
        except torch.OutOfMemoryError as error:
            reason = str(error).splitlines()[0]
            self._trouble = Check("reference", None, Outcome.INCONCLUSIVE, f"{_TOO_LARGE} ({reason})")
            good = False
        for record in self._workers:
            record.step = StepRecord()
        if not good:
            self.end()
        if any(each.type == "cuda" for each in self._parts.placement.drafters):
            # what the reference needed is not the workers': their memory is looked at
            torch.cuda.empty_cache()

    def _judge(self, step: int, differ: Collection[int]) -> bool:
        numbers = [self._worker(step, worker) for worker in range(len(self._workers))]
        exchanged = self._exchange(step)
        kept = torch.float32 if self._parts.settings.workload.masters else self._parts.dtype
        # the same bits need no second judgement
        first = judge_update(self._workers[0], self._state, step, kept)
        updates = [
            self._take(
                "parameters", worker, step, judge_update(record, self._state, step, kept) if worker in differ else first
            )
            for worker, record in enumerate(self._workers)
        ]
        self._judged = step + 1
        return all(numbers) and exchanged and all(updates)

    def report(self) -> list[Check]:
        """A check of each kind for each worker, causes before their consequences, and the negative control."""
        found = [] if self._trouble is None else [self._trouble]
        if not self._judged:
            return found
        workers = range(len(self._workers))
        for worker in workers:
            found += [self._found[name, worker].check(name, worker) for name in ("outputs", "loss", "gradients")]
        for worker in workers:
            if len(self._workers) == 1:
                found.append(Check("exchange", worker, Outcome.NOT_CHECKED, "one drafter: nothing is exchanged"))
            else:
                found.append(self._found["exchange", worker].check("exchange", worker))
            found.append(self._found["parameters", worker].check("parameters", worker))
        return found if self._control is None else [*found, self._control]

    def _take(self, name: str, worker: int, step: int, distances: list[Distance], note: str = "") -> bool:
        return self._found.setdefault((name, worker), _Worst()).take(step, distances, note)

    def _batches(self, worker: int, step: int) -> Sequence[Batch]:
        return self._workers[worker].batches[step * self._micros : (step + 1) * self._micros]

    def _reference(
        self, dtype: torch.dtype, worker: int, step: int, batches: Sequence[Batch], order: Order | None = None
    ) -> StepReference:
        parts = self._parts
        device = parts.placement.drafters[worker]
        weights = {name: each.value for name, each in self._state.items()}
        everyone = range(len(self._workers))
        weight = sum(batch.weight_sum for other in everyone for batch in self._batches(other, step))
        work = parts.settings.workload
        eager = Eager(parts.drafter, parts.frozen[device], dtype, work.loss_type, narrow=work.fp8)
        return eager.step(weights, batches, 1.0 / weight, order)

    def _worker(self, step: int, worker: int) -> bool:
        dtype, narrow, record = self._parts.dtype, self._parts.settings.workload.fp8, self._workers[worker]
        noise = self._noise.setdefault(self._parts.placement.drafters[worker], Noise(dtype, narrow=narrow))
        batches = self._batches(worker, step)
        truth = self._reference(torch.float64, worker, step, batches)
        # every worker's first step, then one worker's a step: rounding depends on shapes far more than on values
        if step == 0 or step % len(self._workers) == worker:
            self._measure(noise, truth, worker, step)
        outputs, losses, gradients = self._distances(record, truth, noise)
        if narrow and not worst([*outputs, *losses, *gradients]).good:
            # a number between two 8-bit ones may become either: by a step, in a row that goes on from there
            for nudge in range(1, _NUDGES + 1):
                noise.see(self._reference(dtype, worker, step, batches, Order(nudge=nudge)), truth)
            outputs, losses, gradients = self._distances(record, truth, noise)
        own = record.step.own or record.gradients
        if self._control is None and worker == len(self._workers) - 1:
            self._control = perturbed_gradient(own, truth.gradient, noise, dtype)
        note = "" if worst(gradients).good else self._note(step, worker, own, truth.gradient, gradients)
        judged = [
            self._take("outputs", worker, step, outputs),
            self._take("loss", worker, step, losses),
            self._take("gradients", worker, step, gradients, note),
        ]
        return all(judged)

    def _distances(
        self, record: WorkerRecord, truth: StepReference, noise: Noise
    ) -> tuple[list[Distance], list[Distance], list[Distance]]:
        """Of outputs, loss and gradients."""
        seen = record.step
        outputs = [
            Distance(HIDDEN, relative(found, right), noise.allowed(HIDDEN))
            for found, right in zip(seen.hidden, truth.hidden, strict=True)
        ]
        losses = [
            Distance(LOSS, relative(number(found), number(right)), noise.allowed(LOSS))
            for found, right in zip(seen.loss_sums, truth.loss_sums, strict=True)
        ]
        return outputs, losses, compare(seen.own or record.gradients, truth.gradient, noise.allowed)

    def _measure(self, noise: Noise, truth: StepReference, worker: int, step: int) -> None:
        """Eager code in the run's dtype, once on a device in another order as well."""
        dtype, batches = self._parts.dtype, self._batches(worker, step)
        plain = self._reference(dtype, worker, step, batches)
        if not noise:
            half = Order(group=max(1, min(GROUP, self._parts.settings.workload.anchors) // 2), backwards=True)
            other = self._reference(dtype, worker, step, batches, half)
            noise.see(other, truth)
            noise.see(other, plain)
        noise.see(plain, truth)

    def _note(self, step: int, worker: int, own: Named, truth: Named, distances: list[Distance]) -> str:
        others = candidates([each.batches for each in self._workers], worker, step, self._micros)

        def gradient(batches: Sequence[Batch]) -> Named:
            return self._reference(torch.float64, worker, step, batches).gradient

        return explain(own, truth, distances, gradient, others)

    @torch.no_grad()
    def _exchange(self, step: int) -> bool:
        """Each worker's gradients after the exchange against the sum of those that went in."""
        if len(self._workers) == 1:
            return True
        dtype = self._parts.dtype
        distances: list[list[Distance]] = [[] for _ in self._workers]
        gradients = [record.gradients for record in self._workers]
        for name, first in gradients[0].items():
            given = [each.step.own[name].to(first.device) for each in self._workers]
            truth = torch.stack([each.double() for each in given]).sum(dim=0)
            plain = given[0].clone()
            for each in given[1:]:
                plain += each
            allowed = tolerance(relative(plain, truth), dtype)
            off = relative(first, truth)
            for found, exchanged in zip(distances, gradients, strict=True):
                same = torch.equal(exchanged[name].to(first.device), first)
                found.append(Distance(name, off if same else relative(exchanged[name], truth), allowed))
        judged = [self._take("exchange", worker, step, each) for worker, each in enumerate(distances)]
        return all(judged)
