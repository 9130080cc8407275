"""A compiled step of any module: every strategy trains as plain torch does, and refuses what it was not built for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from tests.trainer.any_step import Built, build, data, module, take_step, train_plainly
from tests.trainer.test_exchange import in_threads
from trainer.abort import Abort
from trainer.compile import (
    STRATEGIES,
    CompileLog,
    MovedError,
    Prepared,
    StepDefinition,
    StepPlan,
    Strategy,
    UnknownInputsError,
    available_strategies,
    compiled_step,
)
from trainer.compile.failure import capture_error, is_capture_error
from trainer.errors import InputError
from trainer.exchange import ThreadExchange
from trainer.placement import Placement
from trainer.settings import Workload
from trainer.strategy import strategy_of

pytestmark = pytest.mark.torch

CPU = torch.device("cpu")


def uncompiled(name: str) -> Strategy:
    """The strategy's own step, its pieces not compiled: what compiling costs is paid once, further down."""
    return replace(STRATEGIES[name], compile=lambda function: function)


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("accumulation", [1, 2, 3])
@pytest.mark.parametrize("replicas", [1, 2])
def test_every_strategy_trains_as_plain_torch(name: str, accumulation: int, replicas: int) -> None:
    wanted = train_plainly(4, accumulation=accumulation, replicas=replicas)
    exchange = ThreadExchange(replicas, Abort())
    built: list[Built] = [
        build(uncompiled(name), f"plain_{index}", accumulation=accumulation, replicas=replicas)
        for index in range(replicas)
    ]

    def work(index: int) -> Any:
        torch.set_num_threads(1)
        return [
            take_step(built[index], step, accumulation=accumulation, replica=index, exchange=exchange)
            for step in range(4)
        ]

    for each in in_threads(replicas, work):
        assert not isinstance(each, BaseException), each
        assert len({float(norm) for norm in each}) == 4, "kept norms are one and the same memory"
    for mine, other in zip(built, wanted, strict=True):
        torch.testing.assert_close(dict(mine.module.state_dict()), dict(other.state_dict()), rtol=1e-5, atol=1e-6)


@pytest.mark.compiles
@pytest.mark.parametrize("name", ["default", "reduce-overhead", "whole-step"])
def test_a_compiled_step_trains_as_plain_torch_and_compiles_nothing_late(name: str) -> None:
    (wanted,) = train_plainly(3, accumulation=2, replicas=1)
    state = torch.get_rng_state()
    with CompileLog() as log:
        built = build(STRATEGIES[name], f"compiled_{name.replace('-', '_')}", accumulation=2)
    assert torch.equal(torch.get_rng_state(), state)
    assert sum(each.trigger == "DYNAMO" for each in log.events) == 2, "one code object a bucket"
    with CompileLog() as log:
        for step in range(3):
            take_step(built, step, accumulation=2)
    assert log.events == []
    torch.testing.assert_close(dict(built.module.state_dict()), dict(wanted.state_dict()), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", STRATEGIES)
def test_warm_up_leaves_no_trace(name: str) -> None:
    state = torch.get_rng_state()
    built = build(uncompiled(name), "traceless", accumulation=2)
    assert torch.equal(torch.get_rng_state(), state)
    for key, each in module().state_dict().items():
        assert torch.equal(built.module.state_dict()[key], each), key
    assert not any(each.any() for each in built.optimizer.state_tensors().values())
    assert not any(each.any() for each in built.step.gradients)
    assert not built.step.rate


@pytest.mark.parametrize("name", STRATEGIES)
def test_warm_up_keeps_a_resumed_optimizer_and_its_masters(name: str) -> None:
    first = build(uncompiled("eager"), "first", dtype=torch.bfloat16)
    first.step.rate.fill_(0.1)
    first.step.accumulate(data(0, 0, 0).bfloat16(), torch.ones(()), first=True, last=True)
    first.step.update()
    kept = {key: each.clone() for key, each in first.optimizer.state_tensors().items()}
    assert kept["step.0.weight"] == 1 and "master.0.weight" in kept
    # the same optimiser again, under a step of this strategy

    def loss(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = first.module(x).float().square().mean()
        return found, found

    definition = StepDefinition(first.module, loss, first.optimizer, prepare=lambda x: Prepared((x,)))
    examples = ((torch.ones((4, 3), dtype=torch.bfloat16),),)
    compiled_step(StepPlan(definition, examples, 1, 1, "again"), uncompiled(name))
    for key, each in first.optimizer.state_tensors().items():
        assert torch.equal(each, kept[key]), key


@pytest.mark.parametrize("name", ["eager", "whole-step"])
def test_inputs_that_no_example_is_like_are_refused(name: str) -> None:
    step = build(uncompiled(name), "drafter_0").step
    one = torch.ones(())
    with pytest.raises(
        UnknownInputsError, match=r"drafter_0 .* number 0 is float32 \[5, 3\] on cpu; .* float32 \[4, 3\]"
    ):
        step.accumulate(torch.ones(5, 3), one, first=True, last=True)
    with pytest.raises(UnknownInputsError, match=r"number 0 is float64 \[6, 3\]"):
        step.accumulate(torch.ones((6, 3), dtype=torch.float64), one, first=True, last=True)
    with pytest.raises(UnknownInputsError, match="takes 2 inputs, 1 were given"):
        step.accumulate(one, first=True, last=True)
    with pytest.raises(ValueError, match="two of the 2 examples"):
        build(uncompiled(name), "twice", rows=(4, 4))


@pytest.mark.parametrize("name", ["eager", "whole-step"])
def test_parameters_that_moved_are_refused(name: str) -> None:
    given = torch.ones(4, 3), torch.ones(())
    built = build(uncompiled(name), "moved")
    built.module.load_state_dict(module().state_dict(), assign=True)
    with pytest.raises(MovedError, match=r"moved: (0\.weight|unused) is not where it was"):
        built.step.accumulate(*given, first=True, last=True)
    built = build(uncompiled(name), "moved_too")
    built.module[2].weight.data = built.module[2].weight.data.clone()
    with pytest.raises(MovedError, match=r"2\.weight"):
        built.step.accumulate(*given, first=True, last=True)
    built = build(uncompiled(name), "copied")
    built.module.load_state_dict({key: each + 1 for key, each in module().state_dict().items()})
    built.step.accumulate(*given, first=True, last=True)


def test_a_whole_step_knows_its_micro_batches() -> None:
    step = build(uncompiled("whole-step"), "w").step
    given = torch.ones(4, 3), torch.ones(())
    with pytest.raises(ValueError, match="1 micro-batches a step: none of them is first=True, last=False"):
        step.accumulate(*given, first=True, last=False)
    with pytest.raises(RuntimeError, match="after the last micro-batch"):
        step.update()
    step.accumulate(*given, first=True, last=True)
    step.update()
    with pytest.raises(RuntimeError, match="and once"):
        step.update()


def test_what_is_shown_of_a_step_is_the_callers_to_keep() -> None:
    for name in STRATEGIES:
        step = build(uncompiled(name), "kept").step
        shown = [
            step.accumulate(torch.full((4, 3), each), torch.ones(()), first=True, last=True) for each in (1.0, 5.0)
        ]
        assert float(shown[0]) != float(shown[1])


def test_replays_of_a_step_are_known() -> None:
    found = {
        name: [each.replays_per_step(k, n) for k, n in ((1, 1), (3, 1), (1, 2), (3, 2))]
        for name, each in STRATEGIES.items()
    }
    assert found == {
        "eager": [0, 0, 0, 0],
        "default": [0, 0, 0, 0],
        "reduce-overhead": [2, 6, 2, 6],
        "reduce-overhead-trees": [2, 6, 2, 6],
        "whole-step": [1, 3, 2, 4],
    }


def test_strategies_that_cannot_run_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    trees = pytest.importorskip("torch._inductor.cudagraph_trees")
    gpu = torch.device("cuda:0")
    shared = available_strategies([gpu, gpu])
    assert shared.pop("reduce-overhead-trees") == "two threads on cuda:0 would share the graphs of the backward"
    assert set(shared.values()) == {None}
    monkeypatch.delattr(trees, "graph_capture_lock", raising=False)
    why = available_strategies([gpu])["reduce-overhead-trees"]
    assert why is not None and f"torch {torch.__version__} has no thread-safe CUDA graph trees" in why
    # the lock is there, and a thread that did not import the trees still cannot use them
    monkeypatch.setattr(trees, "graph_capture_lock", None, raising=False)

    def none_here(_local: Any, _name: str) -> Any:
        raise AssertionError

    monkeypatch.setattr(trees, "get_obj", none_here)
    assert available_strategies([CPU])["reduce-overhead-trees"] == why


def test_settings_with_a_strategy_that_cannot_run_are_refused() -> None:
    gpu = torch.device("cuda:0")
    workload = replace(Workload(target="x", mask_token=0, block_size=4), strategy="reduce-overhead-trees")
    with pytest.raises(InputError, match="two threads on cuda:0") as refused:
        strategy_of(workload, Placement((gpu, gpu), ((gpu,),)))
    assert refused.value.where == "workload.strategy"
    assert "whole-step" in refused.value.fix and "trees" not in refused.value.fix
    assert strategy_of(replace(workload, strategy="whole-step"), Placement((gpu, gpu), ((gpu,),))).name == "whole-step"


def test_a_failed_capture_is_told_by_its_first_error() -> None:
    try:
        try:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nCUDA kernel errors ...")
        finally:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
    except RuntimeError as error:
        assert is_capture_error(error)
        said = str(capture_error("drafter_1, forward, backward of bucket 0", torch.device("cuda:1"), error))
    assert said.startswith(
        "drafter_1, forward, backward of bucket 0 could not be captured in a CUDA graph on cuda:1: RuntimeError: CUDA "
        "error: operation not permitted when stream is capturing\n"
    )
    assert "drew from its default generator" in said and ".item()" in said
    assert not is_capture_error(ValueError("something else"))


def test_a_parameter_that_nothing_uses_has_a_zero_gradient() -> None:
    built = build(uncompiled("eager"), "unused")
    names = [name for name, _ in built.module.named_parameters()]
    built.step.accumulate(data(0, 0, 0), torch.ones(()), first=True, last=True)
    found = dict(zip(names, built.step.gradients, strict=True))
    assert not found["unused"].any() and found["0.weight"].any()
    assert isinstance(built.module[1], nn.BatchNorm1d) and built.module[1].num_batches_tracked == 1
