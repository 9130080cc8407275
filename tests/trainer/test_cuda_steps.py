"""Compiled steps on a GPU: graphs train as plain torch does, replay exactly as often as said, compile nothing late.

Weights and data are drawn on the CPU; the reference is plain torch on the CPU, for the drafter eager code on the GPU.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.any_step import Built, build, data, module, take_step, train_plainly
from tests.trainer.drafting import COMPILED_CONFIG
from tests.trainer.test_exchange import in_threads
from trainer.abort import Abort
from trainer.anchors import Anchors
from trainer.compile import (
    STRATEGIES,
    CompileLog,
    Gate,
    Prepared,
    StepDefinition,
    StepPlan,
    Strategy,
    compiled_step,
    graph_counts,
    own_device,
    steady_phase,
)
from trainer.dflash_model import DFlashDrafter
from trainer.exchange import ThreadExchange
from trainer.optimizer import ClippedAdamW
from trainer.step import Batch, DrafterStep, FrozenHead, blank_batch

pytestmark = [pytest.mark.torch, pytest.mark.cuda]

GPU = torch.device("cuda:0")
GRAPHED = ["reduce-overhead", "whole-step"]


def uncompiled(name: str) -> Strategy:
    return replace(STRATEGIES[name], compile=lambda function: function)


def available(name: str) -> Strategy:
    why = STRATEGIES[name].refusal([GPU])
    if why is not None:
        pytest.skip(why)
    return STRATEGIES[name]


def on_the_gpu(count: int, make: Callable[[int], Any], work: Callable[[int, Any], Any]) -> tuple[list[Any], list[int]]:
    """What `work` gave in `count` threads, each with what `make` built; captures and replays meanwhile."""
    abort = Abort()
    graph_counts()
    opened = []

    def run(index: int) -> Any:
        name = f"worker-{index}"
        threading.current_thread().name = name
        try:
            with own_device(GPU):
                with gate.exclusive(name):
                    built = make(index)
                gate.pass_through()
                found = work(index, built)
                torch.cuda.current_stream(GPU).synchronize()
                return found
        except BaseException as error:
            abort.fail(name, error)
            raise

    with steady_phase() as begin, CompileLog() as log:

        def on_open() -> None:
            begin()
            opened.extend([graph_counts(), len(log.events)])

        gate = Gate(count, abort, on_open=on_open)
        found = in_threads(count, run, 400)
        for each in found:
            assert not isinstance(each, BaseException), each
        late = log.events[opened[1] :]
    assert late == [], "compiled in the steady phase"
    ended = graph_counts()
    return found, [
        ended.captures.get(0, 0) - opened[0].captures.get(0, 0),
        ended.replays.get(0, 0) - opened[0].replays.get(0, 0),
    ]


def host(built: Built) -> dict[str, torch.Tensor]:
    return {name: each.cpu() for name, each in built.module.state_dict().items()}


def check_steps(built: Built, wanted: torch.nn.Module, *, steps: int, accumulation: int) -> None:
    torch.testing.assert_close(host(built), dict(wanted.state_dict()), rtol=1e-3, atol=1e-4)
    # a BatchNorm step and an update, once for each micro-batch and step, warm-up and captures not counted
    assert int(built.module[1].num_batches_tracked) == steps * accumulation
    assert all(float(each) == steps for key, each in built.optimizer.state_tensors().items() if key.startswith("step."))


@pytest.mark.parametrize("accumulation", [1, 2, 3])
@pytest.mark.parametrize("replicas", [1, 2])
def test_graphs_captured_by_hand(accumulation: int, replicas: int) -> None:
    steps, strategy = 4, uncompiled("whole-step")
    exchange = ThreadExchange(replicas, Abort())

    def make(index: int) -> Built:
        return build(strategy, f"byhand_{index}", accumulation=accumulation, replicas=replicas, device="cuda:0")

    def work(index: int, built: Built) -> Any:
        options = {"accumulation": accumulation, "replica": index, "exchange": exchange}
        return built, [take_step(built, step, **options) for step in range(steps)]

    found, counts = on_the_gpu(replicas, make, work)
    assert counts == [0, replicas * steps * strategy.replays_per_step(accumulation, replicas)]
    wanted = train_plainly(steps, accumulation=accumulation, replicas=replicas)
    for (built, norms), reference in zip(found, wanted, strict=True):
        check_steps(built, reference, steps=steps, accumulation=accumulation)
        assert len({float(each) for each in norms}) == steps, "kept norms are one and the same memory"


class Handed(torch.autograd.Function):
    """The dot product, whose gradient is the other factor itself, not a copy."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return weight.dot(x)

    @staticmethod
    def backward(ctx: Any, _gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.saved_tensors[0], None


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("replicas", [1, 2])
def test_gradients_that_are_a_captures_own(accumulation: int, replicas: int) -> None:
    """With one bucket: plain ones, two that are one tensor, one that is an input, one that nothing gives."""
    steps, shapes = 3, {"plain": (3, 2), "one": (3,), "other": (3,), "handed": (3,), "unused": (2,)}

    def make(_index: int) -> Any:
        own = torch.nn.ParameterDict({key: torch.nn.Parameter(torch.ones(shape)) for key, shape in shapes.items()})
        own.to(GPU)

        def loss(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            mixed = (own["one"] + own["other"]) * x
            found = (x @ own["plain"]).square().sum() + mixed.square().sum() + Handed.apply(own["handed"], x)
            return found, found

        named = list(own.named_parameters())
        optimizer = ClippedAdamW(named, betas=(0.9, 0.95), weight_decay=0.0, clip=1e9)
        definition = StepDefinition(own, loss, optimizer, prepare=lambda x: Prepared((x,)))
        plan = StepPlan(definition, ((torch.ones(3, device=GPU),),), accumulation, replicas, "captures_own")
        return own, compiled_step(plan, uncompiled("whole-step"))

    def work(_index: int, made: Any) -> None:
        own, step = made
        places = [each.data_ptr() for each in step.gradients]
        for number in range(steps):
            inputs = [torch.tensor([1.0, 2.0, 3.0 + number + micro], device=GPU) for micro in range(accumulation)]
            summed = torch.stack(inputs).sum(0)
            squares = torch.stack([torch.outer(x, x) for x in inputs]).sum(0)
            both = 2 * squares.diagonal() * (own["one"] + own["other"]).detach()
            wanted = {
                "plain": 2 * squares @ own["plain"].detach(),
                "one": both,
                "other": both,
                "handed": summed,
                "unused": torch.zeros(2, device=GPU),
            }
            before = {key: each.detach().clone() for key, each in own.items()}
            step.rate.fill_(0.1)
            for micro, x in enumerate(inputs):
                step.accumulate(x, first=micro == 0, last=micro == accumulation - 1)
            found = dict(zip((key for key, _ in own.named_parameters()), step.gradients, strict=True))
            torch.testing.assert_close(found, wanted)
            assert [each.data_ptr() for each in step.gradients] == places
            step.update()
            assert all(torch.equal(each, before[key]) == (key == "unused") for key, each in own.items())

    on_the_gpu(1, make, work)


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_trains_as_plain_torch(name: str) -> None:
    steps, strategy = 4, available(name)
    states = torch.get_rng_state(), torch.cuda.get_rng_state(GPU)

    def make(_index: int) -> Built:
        return build(strategy, f"one_{name.replace('-', '_')}", accumulation=2, device="cuda:0")

    def work(_index: int, built: Built) -> Built:
        for key, each in module().state_dict().items():
            assert torch.equal(built.module.state_dict()[key].cpu(), each), f"warm-up changed {key}"
        assert not any(each.any() for each in built.optimizer.state_tensors().values()), "warm-up left optimiser state"
        for step in range(steps):
            take_step(built, step, accumulation=2)
        return built

    (built,), counts = on_the_gpu(1, make, work)
    assert counts == [0, steps * strategy.replays_per_step(2, 1)]
    check_steps(built, train_plainly(steps, accumulation=2, replicas=1)[0], steps=steps, accumulation=2)
    assert torch.equal(torch.get_rng_state(), states[0]), "the CPU's default generator was drawn from"
    assert torch.equal(torch.cuda.get_rng_state(GPU), states[1]), "the device's default generator was drawn from"


@pytest.mark.parametrize("name", GRAPHED)
@pytest.mark.parametrize("together", [True, False])
def test_two_threads_on_one_gpu(name: str, together: bool) -> None:
    """As two replicas that exchange, and as two that have nothing to do with each other (the update in the graph)."""
    steps, strategy, replicas = 6, STRATEGIES[name], 2 if together else 1
    exchange = ThreadExchange(2, Abort()) if together else None

    def make(index: int) -> Built:
        return build(strategy, f"two_{name.replace('-', '_')}_{index}", replicas=replicas, device="cuda:0")

    def work(index: int, built: Built) -> Built:
        for step in range(steps):
            take_step(built, step, accumulation=1, replica=index, exchange=exchange)
        return built

    found, counts = on_the_gpu(2, make, work)
    assert counts == [0, 2 * steps * strategy.replays_per_step(1, replicas)]
    if together:
        wanted = train_plainly(steps, accumulation=1, replicas=2)
    else:
        wanted = [train_plainly(steps, accumulation=1, replicas=1, first=index)[0] for index in range(2)]
    for built, reference in zip(found, wanted, strict=True):
        check_steps(built, reference, steps=steps, accumulation=1)


@pytest.mark.cuda(2)
@pytest.mark.parametrize("name", GRAPHED)
def test_captures_while_another_gpu_allocates_and_waits(name: str) -> None:
    steps, other, done = 3, torch.device("cuda:1"), threading.Event()

    def disturb() -> None:
        with own_device(other):
            size = 1 << 20
            while not done.is_set():
                # another size each time: the allocator has to ask CUDA
                torch.ones(size, device=other)
                torch.cuda.synchronize(other)
                size = size % (1 << 28) + (1 << 20)

    def work(_index: int, built: Built) -> Built:
        for step in range(steps):
            take_step(built, step, accumulation=1)
        return built

    thread = threading.Thread(target=disturb, name="another GPU's")
    thread.start()
    try:
        strategy, safe = STRATEGIES[name], name.replace("-", "_")
        (built,), counts = on_the_gpu(1, lambda _index: build(strategy, f"beside_{safe}", device="cuda:0"), work)
    finally:
        done.set()
        thread.join()
    assert counts == [0, steps * strategy.replays_per_step(1, 1)]
    check_steps(built, train_plainly(steps, accumulation=1, replicas=1)[0], steps=steps, accumulation=1)


def test_rate_and_scale_are_read_at_every_replay() -> None:
    def work(_index: int, built: Built) -> None:
        step, given = built.step, data(0, 0, 0).to(GPU)

        def take(rate: float, scale: float) -> tuple[list[Any], list[Any]]:
            step.rate.fill_(rate)
            before = [each.detach().clone() for each in built.module.parameters()]
            step.accumulate(given, torch.tensor(scale, device=GPU), first=True, last=True)
            step.update()
            moved = [one.detach() - other for one, other in zip(built.module.parameters(), before, strict=True)]
            return moved, [each.clone() for each in step.gradients]

        still, gradients = take(0.0, 1.0)
        assert not any(each.any() for each in still)
        _, doubled = take(0.0, 2.0)
        torch.testing.assert_close(doubled, [each * 2 for each in gradients], rtol=1e-5, atol=1e-6)
        little, _ = take(0.001, 1.0)
        much, _ = take(0.1, 1.0)
        sizes = [max(float(each.abs().max()) for each in moved) for moved in (little, much)]
        assert 0 < sizes[0] < 0.01 < sizes[1]

    on_the_gpu(1, lambda _index: build(uncompiled("whole-step"), "rates", device="cuda:0"), work)


def test_bfloat16_masters_in_a_graph() -> None:
    def make(index: int) -> Built:
        name = ["whole-step", "eager"][index]
        return build(uncompiled(name), f"narrow_{index}", device="cuda:0", dtype=torch.bfloat16)

    def work(_index: int, built: Built) -> dict[str, Any]:
        for step in range(3):
            built.step.rate.fill_(0.01)
            given = data(step, 0, 0).to(GPU, torch.bfloat16), torch.ones((), device=GPU)
            built.step.accumulate(*given, first=True, last=True)
            built.step.update()
        state = built.optimizer.state_tensors()
        for key, each in built.module.named_parameters():
            assert torch.equal(each.detach(), state[f"master.{key}"].bfloat16()), key
        return {key: each.cpu() for key, each in state.items()}

    (graphed, eager), _ = on_the_gpu(2, make, work)
    torch.testing.assert_close(graphed, eager, rtol=1e-4, atol=1e-5)


def test_graphs_have_a_pool_of_their_own() -> None:
    def pools() -> set[Any]:
        found = torch.cuda.memory_snapshot()
        return {tuple(each["segment_pool_id"]) for each in found if each["device"] == 0} - {(0, 0)}

    before = pools()

    def make(index: int) -> Built:
        return build(uncompiled("whole-step"), f"pool_{index}", accumulation=2, device="cuda:0")

    found, _ = on_the_gpu(2, make, lambda _index, built: (built, pools()))
    assert len(found[0][1] - before) == 2, "one private pool for each worker"


CONFIG = replace(COMPILED_CONFIG, tie_word_embeddings=True)


def drafter_batch(seed: int, bucket: int) -> Batch:
    draw = torch.Generator().manual_seed(seed)
    blank = blank_batch(CONFIG, bucket, 2, 8, device=torch.device("cpu"), dtype=torch.float32)
    positions = torch.stack([torch.randperm(bucket - 2, generator=draw)[:8].sort().values for _ in range(2)])
    keep = torch.ones_like(positions, dtype=torch.bool)
    keep[1, 6:] = False
    return replace(
        blank,
        input_ids=torch.randint(4, 500, blank.input_ids.shape, generator=draw).to(GPU),
        lengths=torch.tensor([bucket, bucket - 30], device=GPU),
        features=torch.randn(blank.features.shape, generator=draw).to(GPU),
        anchors=Anchors(positions.to(GPU), keep.to(GPU)),
        labels=torch.randint(4, 500, blank.labels.shape, generator=draw).to(GPU),
        weights=torch.rand(blank.weights.shape, generator=draw).to(GPU),
    )


def train_drafter(name: str) -> tuple[list[list[torch.Tensor]], list[torch.Tensor], list[list[float]]]:
    """Gradients of each step, how parameters moved, loss sums: 3 steps of 2 micro-batches, both buckets in turn."""
    strategy = available(name)

    def make(_index: int) -> Any:
        drafter = DFlashDrafter(CONFIG, device="cpu", dtype=torch.float32, generator=torch.Generator().manual_seed(1))
        drafter.to(GPU).requires_grad_(True)
        weight = torch.randn((500, 64), generator=torch.Generator().manual_seed(2)).to(GPU)
        optimizer = ClippedAdamW(list(drafter.named_parameters()), betas=(0.9, 0.95), weight_decay=0.01, clip=1.0)
        options = {"buckets": (128, 256), "rows": 2, "slots": 8, "accumulation": 2, "replicas": 1}
        return drafter, DrafterStep(
            drafter,
            FrozenHead(weight, weight),
            optimizer,
            strategy,
            name=f"drafter_{name.replace('-', '_')}",
            **options,
        )

    def work(_index: int, made: Any) -> Any:
        drafter, step = made
        start = [each.detach().cpu() for each in drafter.parameters()]
        gradients, losses = [], []
        for number in range(3):
            step.rate.fill_(0.001 * (number + 1))
            for micro in range(2):
                batch = drafter_batch(10 * number + micro, (128, 256)[(number + micro) % 2])
                normaliser = torch.tensor(0.01, device=GPU)
                losses.append(step.accumulate(batch, normaliser, first=micro == 0, last=micro == 1).numbers())
            gradients.append([each.cpu() for each in step.gradients])
            step.update()
        moved = [each.detach().cpu() - other for each, other in zip(drafter.parameters(), start, strict=True)]
        return gradients, moved, losses

    (found,), counts = on_the_gpu(1, make, work)
    assert counts == [0, 3 * strategy.replays_per_step(2, 1)]
    return found


@pytest.fixture(scope="module")
def eager_drafter() -> Any:
    return train_drafter("eager")


@pytest.mark.parametrize("name", [each for each in STRATEGIES if each != "eager"])
def test_every_strategy_trains_the_drafter_as_eager_does(name: str, eager_drafter: Any) -> None:
    gradients, moved, losses = train_drafter(name)
    wanted, moves, sums = eager_drafter
    for one, other in zip(losses, sums, strict=True):
        assert one == pytest.approx(other, rel=1e-3)
    pairs = [*zip(gradients, wanted, strict=True), (moved, moves)]
    for number, (mine, theirs) in enumerate(pairs):
        for one, other in zip(mine, theirs, strict=True):
            # where a gradient is rounding noise AdamW moves by its sign alone: parameters may differ more
            allowed = 2e-2 if number else 1e-3
            assert float((one - other).norm()) <= allowed * float(other.norm()), number


def test_a_capture_needs_a_stream_of_its_own() -> None:
    with pytest.raises(ValueError, match="a stream of the thread's own"):
        build(uncompiled("whole-step"), "default_stream", device="cuda:0")


def in_a_process(code: str) -> str:
    """A failed capture leaves a process that cannot be used: stdout of one of its own."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


CAPTURE = """
    import threading
    from dataclasses import replace
    import torch
    from torch import nn
    from trainer.compile import STRATEGIES, CaptureError, Prepared, StepDefinition, StepPlan, compiled_step, own_device
    from trainer.optimizer import ClippedAdamW

    gpu = torch.device("cuda:0")
    module = nn.Linear(3, 2).to(gpu)
    optimizer = ClippedAdamW(list(module.named_parameters()), betas=(0.9, 0.95), weight_decay=0.0, clip=1.0)

    def loss(x):
        found = module(x).square().mean()
        return found, found

    def attempt(prepare, name):
        definition = StepDefinition(module, loss, optimizer, prepare)
        strategy = replace(STRATEGIES["whole-step"], compile=lambda function: function)
        with own_device(gpu):
            try:
                compiled_step(StepPlan(definition, ((torch.ones((4, 3), device=gpu),),), 1, 1, name), strategy)
            except CaptureError as error:
                print(error, flush=True)
            else:
                print("no error")
        import os
        os._exit(0)
"""


def test_a_step_that_waits_for_the_gpu_fails_its_capture_plainly() -> None:
    said = in_a_process(
        CAPTURE
        + """
    def prepare(x):
        return Prepared((x * float(x.sum()),))

    attempt(prepare, "drafter_0")
    """
    )
    assert said.startswith("drafter_0, zero, forward, backward, update of bucket 0 (first input [4, 3]) could not be")
    assert "captured in a CUDA graph on cuda:0" in said
    assert "What usually does it: another thread worked on this GPU during the capture" in said
