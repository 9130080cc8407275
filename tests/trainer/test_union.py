"""M drafters on slices of the data train as one on all of it, to rounding: threads on a CPU, and one on each GPU.

The truth is the union's training in float64, on the CPU. What rounding does to it is measured: plain eager code in
float32, over the rows in two orders. AdamW makes more of a rounding than its size (where a gradient is nearly zero, its
sign decides), in what is measured as well. The two trainings compared may be as far apart as the canary allows a
worker to be from the truth, a few times that (`trainer.canary.measure`); both relative to how far the parameter moved.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from tests.trainer.drafting import COMPILED_CONFIG
from tests.trainer.test_exchange import in_threads, union
from trainer.abort import Abort
from trainer.anchors import Anchors
from trainer.canary.measure import Distance, relative, tolerance, worst
from trainer.compile import STRATEGIES, Gate, own_device, steady_phase
from trainer.dflash_model import DFlashDrafter
from trainer.exchange import Exchange, ThreadExchange
from trainer.nccl_exchange import NcclExchange
from trainer.optimizer import ClippedAdamW
from trainer.step import Batch, DrafterStep, FrozenHead, blank_batch

pytestmark = pytest.mark.torch

CPU = torch.device("cpu")
TOKENS, SLOTS, STEPS = 128, 8, 6
CONFIG = COMPILED_CONFIG
Weights = dict[str, torch.Tensor]
Data = list[list[Batch]]
"""By step and replica, one row each, on the CPU."""

_numbers = itertools.count()


def row(number: int) -> Batch:
    draw = torch.Generator().manual_seed(number)
    blank = blank_batch(CONFIG, TOKENS, 1, SLOTS, device=CPU, dtype=torch.float32)
    positions = torch.randperm(TOKENS - 2, generator=draw)[:SLOTS].sort().values[None]
    return replace(
        blank,
        row_ids=(number,),
        input_ids=torch.randint(4, CONFIG.vocab_size, blank.input_ids.shape, generator=draw),
        features=torch.randn(blank.features.shape, generator=draw),
        anchors=Anchors(positions, torch.ones_like(positions, dtype=torch.bool)),
        labels=torch.randint(4, CONFIG.vocab_size, blank.labels.shape, generator=draw),
        weights=torch.rand(blank.weights.shape, generator=draw),
    )


def placed(batch: Batch, device: torch.device, dtype: torch.dtype) -> Batch:
    return replace(
        batch,
        input_ids=batch.input_ids.to(device),
        lengths=batch.lengths.to(device),
        features=batch.features.to(device, dtype),
        anchors=Anchors(batch.anchors.positions.to(device), batch.anchors.keep.to(device)),
        labels=batch.labels.to(device),
        weights=batch.weights.to(device),
    )


def first_weights() -> DFlashDrafter:
    return DFlashDrafter(CONFIG, device="cpu", dtype=torch.float32, generator=torch.Generator().manual_seed(1))


def built(
    device: torch.device, strategy: str, rows: int, replicas: int, dtype: torch.dtype
) -> tuple[DFlashDrafter, DrafterStep]:
    drafter = first_weights().to(device, dtype).requires_grad_(True)
    shape = (CONFIG.vocab_size, CONFIG.hidden_size)
    head = torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(device, dtype)
    optimizer = ClippedAdamW(list(drafter.named_parameters()), betas=(0.9, 0.95), weight_decay=0.01, clip=0.5)
    return drafter, DrafterStep(
        drafter, FrozenHead(head, head), optimizer, STRATEGIES[strategy], buckets=(TOKENS,), rows=rows, slots=SLOTS,
        accumulation=1, replicas=replicas, name=f"union_{next(_numbers)}",
    )  # fmt: skip


def trained(
    devices: Sequence[torch.device],
    data: Data,
    strategy: str,
    exchange: Exchange | None = None,
    dtype: torch.dtype = torch.float32,
) -> list[Weights]:
    """Each replica's parameters after a step for each of `data`, which has a batch for each of `devices`."""
    abort = Abort()

    def work(index: int) -> Weights:
        try:
            torch.set_num_threads(1)
            with own_device(devices[index]):
                return steps(index)
        except BaseException as error:
            abort.fail(f"replica {index}", error)
            raise

    def steps(index: int) -> Weights:
        device = devices[index]
        with gate.exclusive(f"replica {index}"):
            drafter, step = built(device, strategy, len(data[0][index].row_ids), len(devices), dtype)
        gate.pass_through()
        for number, batches in enumerate(data):
            weight = sum(float(each.weights[..., 1:].double().sum()) for each in batches)
            step.rate.fill_(1e-3 * (number + 1))
            step.accumulate(
                placed(batches[index], device, dtype), torch.tensor(1.0 / weight, device=device), first=True, last=True
            )
            if exchange is not None:
                exchange.gradients(index, step.gradients)
            step.update()
        return {name: each.detach().to("cpu", copy=True) for name, each in drafter.named_parameters()}

    with steady_phase() as begin:

        def opened() -> None:
            if exchange is not None:
                exchange.open()
            begin()

        gate = Gate(len(devices), abort, on_open=opened)
        found = in_threads(len(devices), work, 400)
    for each in found:
        assert not isinstance(each, BaseException), each
    return found


def check_union(devices: Sequence[torch.device], strategy: str, exchange: Exchange) -> None:
    """Raises AssertionError where they differ, or where one row of another step would not be noticed."""
    replicas, one = len(devices), devices[:1]
    data = [[row(replicas * step + replica) for replica in range(replicas)] for step in range(STEPS)]
    unions = [[union(batches)] for batches in data]
    backwards = [[union(batches[::-1])] for batches in data]

    (truth,) = trained([CPU], unions, "eager", dtype=torch.float64)
    plain = [trained(one, each, "eager")[0] for each in (unions, backwards)]
    start = {name: each.detach() for name, each in first_weights().named_parameters()}
    moved = {name: each - start[name].double() for name, each in truth.items()}
    allowed = {name: tolerance(max(relative(each[name], truth[name], moved[name]) for each in plain), torch.float32)
               for name in truth}  # fmt: skip

    def distances(found: Weights) -> list[Distance]:
        return [Distance(name, relative(found[name], alone[name], moved[name]), allowed[name]) for name in truth]

    (alone,) = trained(one, unions, strategy)
    several = trained(devices, data, strategy, exchange)
    for each in several:
        assert all(torch.equal(each[name], several[0][name]) for name in truth), "replicas differ"
    found = distances(several[0])
    assert all(each.good for each in found), worst(found)

    data[STEPS // 2][-1] = row(-1)
    missed = [each for each in distances(trained(devices, data, strategy, exchange)[0]) if each.good]
    assert not missed, "one row of another step changes nothing"


@pytest.mark.parametrize("replicas", [2, 3])
def test_threads_on_slices_train_as_one_on_the_union(replicas: int) -> None:
    check_union([CPU] * replicas, "eager", ThreadExchange(replicas, Abort()))


@pytest.mark.cuda(2)
def test_gpus_on_slices_train_as_one_on_the_union() -> None:
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    check_union(devices, "whole-step", NcclExchange(devices, Abort()))
