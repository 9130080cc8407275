"""Compiling in threads: own code objects, one at a time under the gate, nothing left behind, nothing compiled after."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.trainer.test_exchange import CONFIG, batches, in_threads
from trainer.abort import Abort
from trainer.compile import (
    STRATEGIES,
    CompileLog,
    Draw,
    DrawLog,
    Gate,
    GateShutError,
    gate_holder,
    generators_put_back,
    private_function,
    steady_phase,
)
from trainer.dflash_model import DFlashDrafter
from trainer.errors import Aborted
from trainer.evaluation_worker import EvaluationWorker
from trainer.optimizer import ClippedAdamW
from trainer.step import DrafterStep, FrozenHead

pytestmark = pytest.mark.torch

CPU = torch.device("cpu")


def test_private_functions_share_nothing_but_their_text() -> None:
    base = 3

    def add(x: int, *, y: int = 4) -> int:
        return base + x + y

    one, two = private_function(add, "worker_0"), private_function(add, "worker_1")
    assert one(1) == two(1) == 8
    assert one.__code__ is not two.__code__ is not add.__code__
    assert (one.__code__.co_name, two.__code__.co_name) == ("worker_0", "worker_1")
    with pytest.raises(TypeError, match="not a Python function"):
        private_function(len, "x")


@pytest.mark.compiles
@pytest.mark.parametrize("strategy", ["default", "reduce-overhead"])
def test_workers_compile_under_the_gate_and_then_never_again(strategy: str) -> None:
    workers = 2
    abort = Abort()
    layers = [torch.nn.Linear(4, 4, bias=False) for _ in range(workers)]
    start = threading.Barrier(workers)

    def work(index: int) -> Any:
        torch.set_num_threads(1)
        threading.current_thread().name = f"worker-{index}"
        layer = layers[index]

        def forward(x: Any) -> Any:
            return layer(x).sin().sum()

        start.wait()
        with gate.exclusive(f"worker-{index}"):
            compiled = STRATEGIES[strategy].compile(private_function(forward, f"forward_{index}"))
            for _ in range(STRATEGIES[strategy].warm_up_calls):
                compiled(torch.ones(3, 4)).backward()
        gate.pass_through()
        found = []
        for step in range(3):
            layer.weight.grad = None
            x = torch.full((3, 4), float(step + index))
            compiled(x).backward()
            mine = layer.weight.grad.clone()
            layer.weight.grad = None
            forward(x).backward()
            found.append((mine, layer.weight.grad.clone()))
        with pytest.raises(Exception, match="recompil"):
            compiled(torch.ones(5, 4))
        return found

    with CompileLog() as log, steady_phase() as begin:
        gate = Gate(workers, abort, on_open=begin)
        found = in_threads(workers, work, 300)
    for each in found:
        assert isinstance(each, list), each
        for mine, reference in each:
            torch.testing.assert_close(mine, reference, rtol=1e-5, atol=1e-6)
    assert sorted(each.holder or "nobody" for each in log.events if each.trigger == "DYNAMO")[:workers] == [
        "worker-0", "worker-1",
    ]  # fmt: skip
    assert all(each.holder == each.thread for each in log.events)
    # the steady phase is over: compiling is allowed again
    assert torch.compile(lambda x: x + 1)(torch.ones(1)).item() == 2


@pytest.mark.compiles
def test_a_compile_outside_the_gate_is_seen() -> None:
    with CompileLog() as log:
        torch.compile(lambda x: x * 2)(torch.ones(2))
    assert [each.holder for each in log.events] == [None]


def test_gate_lets_one_in_at_a_time_and_opens_once() -> None:
    abort, inside, most, opened = Abort(), [0], [0], []
    gate = Gate(4, abort, on_open=lambda: opened.append(gate_holder()))

    def work(index: int) -> Any:
        with gate.exclusive(f"w{index}"):
            inside[0] += 1
            most[0] = max(most[0], inside[0])
            assert gate_holder() == f"w{index}"
            threading.Event().wait(0.01)
            inside[0] -= 1
        gate.pass_through()
        return len(opened)

    assert in_threads(4, work) == [1, 1, 1, 1]
    assert most == [1] and opened == [None]


def test_a_worker_that_dies_before_the_gate_opens_releases_the_others() -> None:
    abort = Abort()
    gate = Gate(3, abort)
    holding = threading.Event()

    def work(index: int) -> Any:
        if index == 0:
            with gate.exclusive("w0"):
                holding.set()
                abort.subscribe(released.set)
                released.wait()
            return None
        if index == 1:
            holding.wait()
            with gate.exclusive("w1"):
                return "entered after the failure"
        holding.wait()
        abort.fail("w2", RuntimeError("dead"))
        return None

    released = threading.Event()
    found = in_threads(3, work)
    assert isinstance(found[1], Aborted)
    with pytest.raises(Aborted):
        gate.pass_through()


def test_work_before_the_gate_opens_is_refused() -> None:
    gate = Gate(1, Abort())
    with pytest.raises(GateShutError, match="target-0 began its work before the gate opened"):
        gate.check_open("target-0")
    gate.pass_through()
    gate.check_open("target-0")


def test_an_evaluation_before_the_gate_opens_ends_the_run() -> None:
    abort, judged = Abort(), []
    worker = EvaluationWorker([CPU], lambda step, _weights: judged.append(step), Gate(1, abort), 1, abort)
    worker.start()
    worker.send(1, {})
    worker.join()
    assert judged == []
    assert abort.failure is not None and "evaluation began its work before the gate" in str(abort.failure)


def test_who_drew_in_warm_up_is_told_and_the_generator_put_back() -> None:
    before = torch.get_rng_state()

    def work(index: int) -> None:
        threading.current_thread().name = f"worker-{index}"
        with gate.exclusive(f"worker-{index}"), generators_put_back([CPU]):
            torch.rand(1, generator=None if index == 1 else torch.Generator())

    gate = Gate(3, Abort())
    with DrawLog() as log:
        in_threads(3, work)
    assert log.draws == [Draw("worker-1", "cpu")]
    assert torch.equal(torch.get_rng_state(), before)
    in_threads(2, work)
    assert len(log.draws) == 1


@pytest.mark.compiles
@pytest.mark.slow
def test_a_compiled_drafter_equals_an_eager_one_and_warm_up_leaves_no_trace() -> None:
    weight = torch.randn((20, 16), generator=torch.Generator().manual_seed(2))
    batch, other = batches(2)
    # one layer: a C++ compiler needs most of this test's time
    config = replace(CONFIG, num_hidden_layers=1)
    gradients = {}
    for name in ("eager", "default", "whole-step"):
        drafter = DFlashDrafter(config, dtype=torch.float32, generator=torch.Generator().manual_seed(1))
        before = {key: each.clone() for key, each in drafter.state_dict().items()}
        state = torch.get_rng_state()
        optimizer = ClippedAdamW(list(drafter.named_parameters()), betas=(0.9, 0.95), weight_decay=0.0, clip=1.0)
        frozen, strategy = FrozenHead(weight, weight), STRATEGIES[name]
        step = DrafterStep(
            drafter,
            frozen,
            optimizer,
            strategy,
            buckets=(12,),
            rows=1,
            slots=3,
            accumulation=2,
            replicas=2,
            name=f"compile_{name}",
        )
        assert torch.equal(torch.get_rng_state(), state)
        assert all(torch.equal(each, before[key]) for key, each in drafter.state_dict().items())
        assert not any(each.any() for each in step.gradients)
        with CompileLog() as log:
            stats = [
                step.accumulate(_float32(each), torch.tensor(0.25), first=number == 0, last=number == 1)
                for number, each in enumerate((batch, other))
            ]
        assert log.events == []
        gradients[name] = step.gradients, [each.numbers() for each in stats]
    for name in ("default", "whole-step"):
        for one, reference in zip(gradients[name][0], gradients["eager"][0], strict=True):
            torch.testing.assert_close(one, reference, rtol=1e-4, atol=1e-6)
        for one, reference in zip(gradients[name][1], gradients["eager"][1], strict=True):
            assert one == pytest.approx(reference, rel=1e-5)


def _float32(batch: Any) -> Any:
    return replace(batch, features=batch.features.float())
