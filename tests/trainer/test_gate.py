"""The canary's gate with one fault planted in a worker's own replica: the check that is there for it says so."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import Tensor

from trainer.abort import Abort
from trainer.anchors import Anchors
from trainer.canary import controls, entry, gate, numbers, run_canary
from trainer.canary.batches import random_batches
from trainer.canary.controls import run_controls
from trainer.canary.gate import gate_settings
from trainer.canary.measure import relative
from trainer.canary.reference import Eager, Order
from trainer.canary.standstill import Standstill
from trainer.canary.structure import replays_by_step
from trainer.canary.witness import WorkerRecord
from trainer.compile import Gate, GraphCounts, gate_holder
from trainer.errors import Aborted
from trainer.parts import Parts, load_parts
from trainer.replica import DrafterReplica
from trainer.settings import settings_from_json
from trainer.step import Batch, StepStats

pytestmark = pytest.mark.torch

Json = dict[str, Any]
Ready = Callable[..., Json]
Found = dict[str, set[int | None]]


class Planted:
    """A replica's step with a fault; `steps` counts those that began. Subclasses are the faults."""

    def __init__(self, replica: DrafterReplica, worker: int) -> None:
        self.inner, self.replica, self.worker = replica.step, replica, worker
        self.steps = 0

    @property
    def rate(self) -> Tensor:
        return self.inner.rate

    @property
    def gradients(self) -> list[Tensor]:
        return self.inner.gradients

    def accumulate(self, batch: Batch, normaliser: Tensor, *, first: bool, last: bool) -> StepStats:
        self.steps += first
        return self.inner.accumulate(batch, normaliser, first=first, last=last)

    def update(self) -> Tensor:
        return self.inner.update()


Fault = Callable[[DrafterReplica, int], Planted]


def verdict(
    settings: Json, out: Path, monkeypatch: pytest.MonkeyPatch, fault: Fault
) -> tuple[str, Found, dict[tuple[str, int | None], str]]:
    """Outcome, which checks failed for whom, and every check's summary."""

    def planted(parts: Parts, worker: int) -> DrafterReplica:
        replica = real(parts, worker)
        return replace(replica, step=fault(replica, worker))  # type: ignore[arg-type]

    real = gate.build_replica
    monkeypatch.setattr(gate, "build_replica", planted)
    out.mkdir()
    run_canary(settings_from_json(settings), out)
    evidence = json.loads((out / "evidence.json").read_text())
    failed: Found = {}
    for check in evidence["checks"]:
        if check["outcome"] == "fail":
            failed.setdefault(check["id"], set()).add(check["worker"])
    said = {(check["id"], check["worker"]): check["summary"] for check in evidence["checks"]}
    return evidence["summary"], failed, said


def test_a_rate_that_is_not_the_plans(ready: Ready, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stuck(Planted):
        def accumulate(self, batch: Batch, normaliser: Tensor, *, first: bool, last: bool) -> StepStats:
            self.rate.fill_(1e-3)
            return super().accumulate(batch, normaliser, first=first, last=last)

    _, failed, said = verdict(ready(), tmp_path / "out", monkeypatch, Stuck)
    assert failed == {"learning_rate": {0, 1}}
    assert "step 2 was taken at learning rate 1.0000e-03, the plan's is 5.0000e-04" in said["learning_rate", 0]


def test_what_warm_up_left_behind(ready: Ready, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Warm(Planted):
        def __init__(self, replica: DrafterReplica, worker: int) -> None:
            super().__init__(replica, worker)
            with torch.no_grad():
                next(replica.drafter.parameters()).mul_(1.5)

    _, failed, said = verdict(ready(), tmp_path / "out", monkeypatch, Warm)
    assert failed == {"warm_up": {0, 1}}
    assert "is not the start's after warm-up" in said["warm_up", 0]


def test_an_update_that_is_counted_twice(ready: Ready, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Twice(Planted):
        def update(self) -> Tensor:
            norm = super().update()
            return norm if self.steps == 1 else super().update()

    _, failed, said = verdict(ready(), tmp_path / "out", monkeypatch, Twice)
    assert failed["warm_up"] == failed["parameters"] == {0, 1}
    assert "the optimiser counts 3 updates of" in said["warm_up", 1] and "after step 2, not 2" in said["warm_up", 1]


@pytest.mark.parametrize("moment", [None, 0.0, 1.1])
def test_a_wrong_update_without_master_weights(
    ready: Ready, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: float | None
) -> None:
    class Wrong(Planted):
        def update(self) -> Tensor:
            weight = dict(self.replica.drafter.named_parameters())["fc.weight"].detach()
            before, norm = weight.clone(), super().update()
            if moment is None:
                weight.copy_(before)
            else:
                self.replica.optimizer.state_tensors()["exp_avg_sq.fc.weight"].mul_(moment)
            return norm

    settings = ready(dtype="bfloat16", master_weights="none")
    _, failed, said = verdict(settings, tmp_path / "out", monkeypatch, Wrong)
    assert failed == {"parameters": {0, 1}}
    assert "fc.weight at step 1" in said["parameters", 0]


def test_a_draw_from_the_default_generator(ready: Ready, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Drawing(Planted):
        def update(self) -> Tensor:
            if self.worker == 1:
                torch.rand(1)
            return super().update()

    _, failed, said = verdict(ready(), tmp_path / "out", monkeypatch, Drawing)
    assert failed == {"generators": {None}}
    assert "generator of cpu was drawn from, seen after step 1" in said["generators", None]


def test_a_draw_in_warm_up_is_told_by_its_worker_though_it_is_put_back(
    ready: Ready, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Drawing(gate.HiddenFunction):
        def __call__(self, batch: Batch) -> Tensor:
            if threading.current_thread().name == gate_holder() == "drafter-1":
                torch.rand(1)
            return super().__call__(batch)

    monkeypatch.setattr(gate, "HiddenFunction", Drawing)
    _, failed, said = verdict(ready(), tmp_path / "out", monkeypatch, Planted)
    assert failed == {"generators": {1}}
    assert said["generators", 1].startswith("its warm-up drew from the default generator of cpu")


def test_a_replica_that_is_still_held_is_no_warning(
    ready: Ready, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = []

    class Kept(Planted):
        def __init__(self, replica: DrafterReplica, worker: int) -> None:
            super().__init__(replica, worker)
            if worker == 1:
                kept.append(replica.drafter)

    _, failed, said = verdict(ready(), tmp_path / "out", monkeypatch, Kept)
    assert failed == {"memory_back": {None}}
    assert "0 of the gate's 2 replicas" in said["memory_back", None] and "are still held" in said["memory_back", None]


def test_a_parameter_whose_memory_was_given_back_is_not_held(
    ready: Ready, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU under reduce-overhead: what its graphs write to leads through autograd to the parameters."""
    kept = []

    class Kept(Planted):
        def __init__(self, replica: DrafterReplica, worker: int) -> None:
            super().__init__(replica, worker)
            kept.extend(replica.drafter.parameters())

    def give_back(workers: Sequence[WorkerRecord]) -> None:
        for worker in workers:
            for each in worker.trained.drafter.parameters():
                each.untyped_storage().resize_(0)

    monkeypatch.setattr(entry, "give_back", give_back)
    _, failed, _ = verdict(ready(), tmp_path / "out", monkeypatch, Kept)
    assert failed == {}


def test_replicas_that_drift_apart_by_a_single_bit(
    ready: Ready, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Drifting(Planted):
        def update(self) -> Tensor:
            norm = super().update()
            if self.worker == 1 and self.steps == 2:
                weight = next(self.replica.drafter.parameters()).detach()
                weight[0, 0] = torch.nextafter(weight[0, 0], torch.tensor(9.0))
            return norm

    _, failed, said = verdict(ready(), tmp_path / "out", monkeypatch, Drifting)
    assert failed == {"replicas": {1}}
    assert "fc.weight differs from the first replica's after step 2" in said["replicas", 1]


class Elsewhere(Planted):
    """Trains on another batch than the worker's."""

    def batch(self, own: Batch) -> Batch:
        raise NotImplementedError

    def accumulate(self, batch: Batch, normaliser: Tensor, *, first: bool, last: bool) -> StepStats:
        self.steps += first
        return self.inner.accumulate(self.batch(batch), normaliser, first=first, last=last)


def test_a_worker_on_anothers_data_is_told_whose(ready: Ready, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ready()
    theirs = random_batches(load_parts(gate_settings(settings_from_json(settings))), 0, 2)

    class Others(Elsewhere):
        def batch(self, own: Batch) -> Batch:
            return theirs[self.steps - 1] if self.worker == 1 else own

    summary, failed, said = verdict(settings, tmp_path / "out", monkeypatch, Others)
    assert failed == {"loss": {1}, "gradients": {1}}
    assert said["gradients", 1].endswith("they are the gradients of drafter 0's batches: it trains on another's data")
    assert summary.startswith("loss (drafter 1)")


def test_stale_inputs_are_told_by_their_step(ready: Ready, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stale(Elsewhere):
        kept: Batch | None = None

        def batch(self, own: Batch) -> Batch:
            self.kept = self.kept or own
            return self.kept if self.worker == 1 else own

    _, failed, said = verdict(ready(), tmp_path / "out", monkeypatch, Stale)
    assert failed == {"loss": {1}, "gradients": {1}}
    assert "at step 2" in said["gradients", 1]
    assert said["gradients", 1].endswith("its own batches of step 1: its inputs are stale")


def test_a_normaliser_of_ones_own_is_told_by_its_factor(
    ready: Ready, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Local(Planted):
        def accumulate(self, batch: Batch, normaliser: Tensor, *, first: bool, last: bool) -> StepStats:
            return super().accumulate(batch, 2 * normaliser, first=first, last=last)

    _, failed, said = verdict(ready(), tmp_path / "out", monkeypatch, Local)
    assert failed == {"gradients": {0, 1}}
    assert "they are 2 times the reference's: is the normaliser" in said["gradients", 0]


def test_a_reference_without_room_is_no_verdict_on_the_workers(
    ready: Ready, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8.00 GiB\nmore of it")

    monkeypatch.setattr(numbers.Eager, "step", full)
    summary, failed, _ = verdict(ready(), tmp_path / "out", monkeypatch, Planted)
    assert not failed
    assert summary.startswith("reference: the reference found no room") and "8.00 GiB" in summary
    assert json.loads((tmp_path / "out" / "evidence.json").read_text())["outcome"] == "inconclusive"


def test_one_drafter_exchanges_nothing(ready: Ready, tmp_path: Path) -> None:
    assert run_canary(settings_from_json(ready(drafter_threads=1)), tmp_path) == 0
    checks = json.loads((tmp_path / "evidence.json").read_text())["checks"]
    assert [each["outcome"] for each in checks if each["id"] == "exchange"] == ["not_checked"]


def test_shared_code_is_noticed_and_a_check_that_does_not_notice_is_told(
    ready: Ready, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = load_parts(gate_settings(settings_from_json(ready(strategy="reduce-overhead"))))
    found = {check.id: check.outcome.value for check in run_controls(parts, Gate(1, Abort()))}
    assert found == {"control_code_objects": "pass", "control_graphs": "not_checked"}
    for blind in (0, 1):
        monkeypatch.setattr(controls, "own_code_objects", lambda events, worker, blind=blind: blind)
        assert run_controls(parts, Gate(1, Abort()))[0].outcome.value == "inconclusive"


def test_a_control_that_raises_leaves_the_numbers_verdict(
    ready: Ready, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raises(*_arguments: object) -> int:
        raise TypeError("torch lost its head")

    monkeypatch.setattr(controls, "own_code_objects", raises)
    assert run_canary(settings_from_json(ready(strategy="reduce-overhead")), tmp_path) == 7
    evidence = json.loads((tmp_path / "evidence.json").read_text())
    assert evidence["again"] == evidence["summary"]
    checks = {each["id"]: each for each in evidence["checks"]}
    assert checks["control_code_objects"]["outcome"] == "inconclusive"
    assert checks["control_code_objects"]["summary"].endswith("TypeError: torch lost its head")
    assert checks["gradients"]["outcome"] == "pass"


def test_a_process_that_dies_in_a_control_has_asked_for_another_one(
    ready: Ready, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, Any]] = []

    def dies(*_arguments: object) -> int:
        seen.append(json.loads((tmp_path / "evidence.json").read_text()))
        assert threading.current_thread() is not threading.main_thread()
        return 1

    monkeypatch.setattr(controls, "own_code_objects", dies)
    run_canary(settings_from_json(ready(strategy="reduce-overhead")), tmp_path)
    assert seen[0]["outcome"] == "inconclusive"
    assert seen[0]["again"] == "the process died in a control of the canary's own"
    assert "gradients" in {check["id"] for check in seen[0]["checks"]}
    # and nothing of it is left where none died
    assert "again" not in json.loads((tmp_path / "evidence.json").read_text())


def test_replays_are_counted_by_step_and_device() -> None:
    counts = [GraphCounts({}, replays) for replays in ({}, {0: 6, 1: 6}, {0: 12, 1: 8}, {0: 18, 1: 14})]
    assert [replays_by_step(counts, device) for device in (0, 1, 2)] == [[6, 6, 6], [6, 2, 6], [0, 0, 0]]
    assert replays_by_step(counts[:1], 0) == []


@pytest.mark.parametrize("loss_type", ["dflash", "dpace"])
def test_another_order_is_the_same_reference(ready: Ready, loss_type: str) -> None:
    parts = load_parts(gate_settings(settings_from_json(ready(anchors=5, batch_size=2, loss_type=loss_type))))
    device = parts.placement.drafters[0]
    (batch,) = random_batches(parts, 0, 1)
    # padding slots among the anchors
    batch = replace(batch, anchors=Anchors(batch.anchors.positions, batch.anchors.keep & (torch.arange(5) < 4)))
    eager = Eager(parts.drafter, parts.frozen[device], torch.float64, loss_type)
    orders = (Order(), Order(group=2, backwards=True), Order(group=1))
    first, *others = (eager.step(parts.start.weights, [batch], 0.1, order) for order in orders)
    for other in others:
        assert relative(other.hidden[0], first.hidden[0]) < 1e-14
        assert other.loss_sums == pytest.approx(first.loss_sums, rel=1e-14)
        assert max(relative(other.gradient[name], first.gradient[name]) for name in first.gradient) < 1e-13


def test_nobody_goes_on_before_all_have_stopped_and_been_looked_at() -> None:
    still, went, guard = Standstill(3, Abort()), [], threading.Lock()

    def worker(name: str) -> None:
        for step in range(2):
            still.stop()
            with guard:
                went.append((step, name))

    threads = [threading.Thread(target=worker, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for step in range(2):
        assert still.wait_for_all(lambda: True)
        assert len(went) == 3 * step
        assert still.let_go()
    for thread in threads:
        thread.join()
    assert sorted(went) == [(step, name) for step in range(2) for name in "abc"]


def test_a_failure_ends_the_standstill_for_all() -> None:
    abort, ended = Abort(), threading.Event()
    still = Standstill(2, abort)

    def waits() -> None:
        with pytest.raises(Aborted, match="drafter-1"):
            still.stop()
        ended.set()

    thread = threading.Thread(target=waits)
    thread.start()
    abort.fail("drafter-1", RuntimeError("no"))
    assert not still.wait_for_all(lambda: True)
    thread.join()
    assert ended.is_set()


def test_a_worker_that_ended_early_keeps_nobody_waiting() -> None:
    still, ended = Standstill(2, Abort()), threading.Event()

    def waits() -> None:
        with pytest.raises(Aborted, match="was broken"):
            still.stop()
        ended.set()

    thread = threading.Thread(target=waits)
    thread.start()
    assert not still.wait_for_all(lambda: False)
    thread.join()
    assert ended.is_set()
