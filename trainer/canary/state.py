"""The replicas' state while all stand still: traces of warm-up, updates counted, rates, generators, sameness."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trainer.canary.evidence import Check, Outcome
from trainer.canary.update import RULE
from trainer.canary.witness import WorkerRecord
from trainer.compile import DrawLog
from trainer.parts import Parts

_WARMED = "after warm-up"
_DRAWN = "another thread's capture breaks on that, and no run repeats; give each worker a torch.Generator of its own"


class StateWatch:
    """Compares state bit for bit. What is kept of each check is its first trouble, by worker; none is good.

    Make it before any worker starts: it remembers the default generators as they are then. `draws` holds what warm-up
    drew and put back.
    """

    def __init__(self, parts: Parts, workers: Sequence[WorkerRecord], draws: DrawLog) -> None:
        self._parts = parts
        self._workers = workers
        self._draws = draws
        self._looks = 0
        self._trouble: dict[tuple[str, int | None], str] = {}
        devices = parts.placement.drafters
        self._cuda = sorted({each.index or 0 for each in devices if each.type == "cuda"})
        self._generators = self._generator_states()

    def look(self, done: int) -> frozenset[int]:
        """After `done` steps of every worker; the workers whose replicas differ from the first one's."""
        when = _WARMED if done == 0 else f"after step {done}"
        self._looks = done + 1
        self._generators_untouched(when)
        for index, worker in enumerate(self._workers):
            if done == 0:
                self._is_the_start(index, worker)
            else:
                self._rate(index, worker, done)
            self._counted(index, worker, done, when)
        return frozenset(w for w in range(1, len(self._workers)) if not self._like_the_first(w, when))

    def causes(self) -> list[Check]:
        """The checks of what makes numbers wrong: `warm_up`, `learning_rate`, `generators`."""
        if not self._looks:
            return []
        workers = range(len(self._workers))
        start = "the start's weights after warm-up, and one update counted for each step"
        found = [self._check("warm_up", worker, start) for worker in workers]
        if self._looks > 1:
            steps = self._looks - 1
            rates = f"the plan's at each of {steps} steps, from {RULE.rate(0):.1e} to {RULE.rate(steps - 1):.1e}"
            found += [self._check("learning_rate", worker, rates) for worker in workers]
        for draw in self._draws.draws:
            drew = f"its warm-up drew from the default generator of {draw.device}: {_DRAWN}"
            self._say("generators", int(draw.thread.rpartition("-")[2]), drew)
        found += [self._check("generators", worker, "its warm-up drew from no default generator") for worker in workers]
        where = ", ".join(["cpu", *(f"cuda:{index}" for index in self._cuda)])
        return [*found, self._check("generators", None, f"nobody drew from a default generator ({where})")]

    def sameness(self) -> list[Check]:
        """`replicas`: what makes them differ is wrong before."""
        if not self._looks:
            return []
        what = f"parameters and optimiser equal the first replica's bit for bit after each of {self._looks - 1} steps"
        return [self._check("replicas", worker, what) for worker in range(len(self._workers))]

    def _check(self, name: str, worker: int | None, good: str) -> Check:
        trouble = self._trouble.get((name, worker))
        outcome = Outcome.PASS if trouble is None else Outcome.FAIL
        return Check(name, worker, outcome, trouble or good, {"looks": self._looks})

    def _say(self, name: str, worker: int | None, trouble: str) -> None:
        self._trouble.setdefault((name, worker), trouble)

    def _generator_states(self) -> dict[str, Tensor]:
        states = {"cpu": torch.random.get_rng_state()}
        for index in self._cuda:
            states[f"cuda:{index}"] = torch.cuda.get_rng_state(index)
        return states

    def _generators_untouched(self, when: str) -> None:
        now = self._generator_states()
        moved = [name for name, state in now.items() if not torch.equal(state, self._generators[name])]
        if moved:
            self._say("generators", None, f"the default generator of {moved[0]} was drawn from, seen {when}: {_DRAWN}")

    def _is_the_start(self, index: int, worker: WorkerRecord) -> None:
        start, optimizer = self._parts.start.weights, worker.trained.optimizer.state_tensors()
        for name, parameter in worker.trained.drafter.named_parameters():
            if not torch.equal(parameter.detach().cpu(), start[name]):
                self._say("warm_up", index, f"{name} is not the start's after warm-up: an update of it was kept")
            for key in ("exp_avg", "exp_avg_sq"):
                moment = optimizer.get(f"{key}.{name}")
                if moment is not None and bool(moment.any()):
                    self._say("warm_up", index, f"{key} of {name} is not zero after warm-up: an update of it was kept")

    def _counted(self, index: int, worker: WorkerRecord, done: int, when: str) -> None:
        kept = worker.trained.optimizer.state_tensors()
        for name, value in kept.items():
            if name.startswith("step.") and float(value) != done:
                trouble = (
                    f"the optimiser counts {float(value):g} updates of {name.removeprefix('step.')} {when}, not {done}"
                )
                self._say("warm_up", index, trouble)
                return

    def _rate(self, index: int, worker: WorkerRecord, done: int) -> None:
        wanted = RULE.rate(done - 1)
        rate = worker.trained.step.rate
        if float(rate) != float(torch.tensor(wanted, dtype=rate.dtype)):
            plan = f"the plan's is {wanted:.4e}"
            self._say("learning_rate", index, f"step {done} was taken at learning rate {float(rate):.4e}, {plan}")

    def _like_the_first(self, index: int, when: str) -> bool:
        first, own = _tensors(self._workers[0]), _tensors(self._workers[index])
        for name, each in own.items():
            if not torch.equal(each, first[name].to(each.device)):
                self._say("replicas", index, f"{name} differs from the first replica's {when}")
                return False
        return True


def _tensors(worker: WorkerRecord) -> dict[str, Tensor]:
    parameters = {name: each.detach() for name, each in worker.trained.drafter.named_parameters()}
    return {**parameters, **worker.trained.optimizer.state_tensors()}
