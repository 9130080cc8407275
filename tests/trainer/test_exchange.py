"""The exchange between replicas, and the queues: right sums, the same bits everywhere, nothing waits for ever."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from trainer.abort import Abort
from trainer.anchors import Anchors
from trainer.compile import STRATEGIES
from trainer.dflash_model import DFlashDrafter, DrafterConfig
from trainer.errors import Aborted
from trainer.exchange import ThreadExchange
from trainer.optimizer import ClippedAdamW, learning_rate_at
from trainer.queues import Assignments, OrderedQueue
from trainer.step import Batch, DrafterStep, FrozenHead

pytestmark = pytest.mark.torch

CONFIG = DrafterConfig(
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    rms_norm_eps=1e-6,
    rope_theta=1e4,
    vocab_size=20,
    block_size=4,
    num_target_layers=6,
    target_layer_ids=(1, 3),
    mask_token_id=0,
    max_position_embeddings=64,
    tie_word_embeddings=False,
    initializer_range=0.1,
)


def in_threads(count: int, work: Callable[[int], Any], seconds: float = 60) -> list[Any]:
    """Results of `work(index)` in `count` threads; a thread that is still alive after `seconds` fails the test."""
    found: list[Any] = [None] * count

    def run(index: int) -> None:
        try:
            found[index] = work(index)
        except BaseException as error:
            found[index] = error

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(count)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(seconds)
        assert not each.is_alive(), "a worker waits for ever"
    return found


def batches(rows: int) -> list[Batch]:
    """One row each, with random content and weights."""
    generator = torch.Generator().manual_seed(5)
    made = []
    for row in range(rows):
        positions = torch.randperm(8, generator=generator)[:3].sort().values[None]
        made.append(
            Batch(
                row_ids=(row,),
                input_ids=torch.randint(1, 20, (1, 12), generator=generator),
                lengths=torch.tensor([12]),
                features=torch.randn((1, 12, 32), generator=generator, dtype=torch.float64),
                anchors=Anchors(positions, torch.ones((1, 3), dtype=torch.bool)),
                labels=torch.randint(1, 20, (1, 3, 4), generator=generator),
                weights=torch.rand((1, 3, 4), generator=generator),
                weight_sum=0.0,
            )
        )
    return made


def union(parts: list[Batch]) -> Batch:
    return Batch(
        row_ids=tuple(row for each in parts for row in each.row_ids),
        input_ids=torch.cat([each.input_ids for each in parts]),
        lengths=torch.cat([each.lengths for each in parts]),
        features=torch.cat([each.features for each in parts]),
        anchors=Anchors(
            torch.cat([each.anchors.positions for each in parts]), torch.cat([each.anchors.keep for each in parts])
        ),
        labels=torch.cat([each.labels for each in parts]),
        weights=torch.cat([each.weights for each in parts]),
        weight_sum=0.0,
    )


def replica(rows: int, loss_type: str = "dflash") -> tuple[DFlashDrafter, DrafterStep]:
    drafter = DFlashDrafter(CONFIG, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    weight = torch.randn((20, 16), generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    optimizer = ClippedAdamW(list(drafter.named_parameters()), betas=(0.9, 0.95), weight_decay=0.01, clip=0.5)
    frozen, eager = FrozenHead(weight, weight), STRATEGIES["eager"]
    return drafter, DrafterStep(
        drafter, frozen, optimizer, eager, buckets=(12,), rows=rows, slots=3, accumulation=2, replicas=2, name="t",
        loss_type=loss_type,
    )  # fmt: skip


@pytest.mark.parametrize("loss_type", ["dflash", "dpace"])
@pytest.mark.parametrize(("workers", "accumulation"), [(2, 1), (3, 2)])
def test_replicas_on_slices_equal_one_on_the_union(workers: int, accumulation: int, loss_type: str) -> None:
    slices = batches(workers * accumulation)
    normaliser = 1.0 / sum(each.weights[..., 1:].sum() for each in slices)
    alone, alone_step = replica(len(slices), loss_type)
    alone_step.rate.fill_(0.01)
    alone_stats = alone_step.accumulate(union(slices), normaliser, first=True, last=True)
    alone_gradients = [each.clone() for each in alone_step.gradients]
    alone_norm = alone_step.update()
    exchange = ThreadExchange(workers, Abort())

    def work(index: int) -> tuple[Any, ...]:
        torch.set_num_threads(1)
        drafter, step = replica(1, loss_type)
        step.rate.fill_(0.01)
        sums = [
            step.accumulate(each, normaliser, first=number == 1, last=number == accumulation)
            for number, each in enumerate(slices[index::workers], 1)
        ]
        exchange.gradients(index, step.gradients)
        gradients = [each.clone() for each in step.gradients]
        norm = step.update()
        assert all(torch.equal(one, other) for one, other in zip(step.gradients, gradients, strict=True))
        return sums, gradients, norm, [each.detach().clone() for each in drafter.parameters()]

    found = in_threads(workers, work)
    for sums, gradients, norm, parameters in found:
        for one, other in zip(gradients, alone_gradients, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-9)
        torch.testing.assert_close(norm, alone_norm, rtol=1e-7, atol=0)
        for one, other in zip(parameters, alone.parameters(), strict=True):
            torch.testing.assert_close(one, other.detach(), rtol=1e-6, atol=1e-7)
        for one, first in zip(parameters, found[0][3], strict=True):
            assert torch.equal(one, first), "replicas differ"
        assert len(sums) == accumulation
    loss = sum(float(each.loss_sum) for sums, *_ in found for each in sums)
    assert loss == pytest.approx(float(alone_stats.loss_sum), rel=1e-6)


def test_sums_do_not_depend_on_who_comes_first() -> None:
    values = [torch.tensor([1e8, 1.0]), torch.tensor([1.0, 1e-8]), torch.tensor([-1e8, 3.0])]
    wanted = (values[0] + values[1]) + values[2]
    for late in range(3):
        exchange = ThreadExchange(3, Abort())
        gate = threading.Event()

        def work(index: int, exchange: ThreadExchange = exchange, late: int = late, gate: Any = gate) -> Any:
            mine = [values[index].clone()]
            if index == late:
                gate.wait(5)
            elif index == (late + 1) % 3:
                gate.set()
            exchange.gradients(index, mine)
            return mine[0]

        assert all(torch.equal(each, wanted) for each in in_threads(3, work))


def test_scalars_many_times_in_a_row() -> None:
    exchange = ThreadExchange(3, Abort())

    def work(index: int) -> list[list[float]]:
        return [exchange.scalars(index, [float(index + turn), 1.0]) for turn in range(200)]

    found = in_threads(3, work)
    assert found[0] == found[1] == found[2] == [[3.0 + 3 * turn, 3.0] for turn in range(200)]


def test_a_failure_releases_those_who_wait(capsys: pytest.CaptureFixture[str]) -> None:
    abort = Abort()
    exchange = ThreadExchange(4, abort)
    queue: OrderedQueue[int] = OrderedQueue(1, abort)
    queue.put(0, 0)

    def work(index: int) -> Any:
        if index == 0:
            exchange.scalars(0, [1.0])
        elif index == 1:
            exchange.gradients(1, [torch.zeros(1)])
        elif index == 2:
            queue.put(1, 1)
        else:
            abort.fail("drafter-3", ValueError("broken on purpose"))
        return None

    found = in_threads(4, work)
    assert all(isinstance(each, Aborted) for each in found[:3])
    assert "drafter-3" in str(found[0])
    failure = abort.failure
    assert failure is not None and failure.worker == "drafter-3" and "broken on purpose" in failure.trace
    assert "drafter-3 failed:" in capsys.readouterr().err
    with pytest.raises(Aborted):
        OrderedQueue[int](1, abort).get()


def test_only_the_first_failure_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    abort = Abort()
    abort.fail("a", ValueError("first"))
    abort.fail("b", ValueError("second"))
    assert abort.failure is not None and abort.failure.worker == "a"
    assert "second" not in capsys.readouterr().err


def test_queue_keeps_order_whoever_is_first() -> None:
    queue: OrderedQueue[int] = OrderedQueue(2, Abort())
    assignments = Assignments(0, 30, 1, 1)

    def work(index: int) -> Any:
        if index == 0:
            return [queue.get() for _ in range(30)]
        while (mine := assignments.take()) is not None:
            queue.put(mine.index, mine.step)
            assert len(queue) <= 2
        return None

    assert in_threads(4, work)[0] == list(range(30))


def test_a_closed_queue_lets_producers_go() -> None:
    queue: OrderedQueue[int] = OrderedQueue(1, Abort())
    queue.put(0, 0)

    def work(index: int) -> Any:
        return queue.put(1, 1) if index == 0 else queue.close()

    assert in_threads(2, work)[0] is False


def test_assignments_cover_each_micro_batch_once_in_need_order() -> None:
    assignments = Assignments(2, 4, 2, 2)
    taken = []
    while (each := assignments.take()) is not None:
        taken.append((each.step, each.micro, each.worker, each.index))
    assert taken == [
        (2, 0, 0, 0), (2, 0, 1, 0), (2, 1, 0, 1), (2, 1, 1, 1), (3, 0, 0, 2), (3, 0, 1, 2), (3, 1, 0, 3), (3, 1, 1, 3),
    ]  # fmt: skip


def test_learning_rate_warms_up_and_falls_to_zero() -> None:
    rates = [learning_rate_at(step, steps=100, peak=1.0, warmup_ratio=0.04) for step in range(101)]
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates[5:] == sorted(rates[5:], reverse=True)
    assert rates[52] == pytest.approx(0.5)
    assert rates[100] == pytest.approx(0.0, abs=1e-12)


def test_bfloat16_parameters_follow_float32_masters() -> None:
    parameter = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    plain = torch.nn.Parameter(torch.ones(4))
    reference = torch.optim.AdamW([plain], lr=1e-4, betas=(0.9, 0.95), weight_decay=0.0)
    optimizer = ClippedAdamW([("p", parameter)], betas=(0.9, 0.95), weight_decay=0.0, clip=1e6)
    optimizer.rate.fill_(1e-4)
    plain.grad = torch.full((4,), 0.5)
    for _ in range(60):
        optimizer.step([torch.full((4,), 0.5, dtype=torch.bfloat16)])
        reference.step()
    torch.testing.assert_close(optimizer.state_tensors()["master.p"], plain.detach())
    # each single update is below bfloat16's resolution near 1: without masters nothing would have moved
    assert torch.equal(parameter.detach(), plain.detach().bfloat16())
    assert float(parameter.detach()[0]) < 1.0


def test_between_the_last_to_come_and_the_first_sum_each_worker_is_told() -> None:
    told: list[tuple[int, list[float]]] = []
    mine = [[torch.full((2,), float(10**worker))] for worker in range(3)]
    met = threading.Barrier(3)

    def between(worker: int) -> None:
        told.append((worker, [float(each[0][0]) for each in mine]))
        met.wait()

    exchange = ThreadExchange(3, Abort(), between)
    in_threads(3, lambda index: exchange.gradients(index, mine[index]), 60)
    assert sorted(told) == [(worker, [1.0, 10.0, 100.0]) for worker in range(3)]
    assert [each[0].tolist() for each in mine] == [[111.0, 111.0]] * 3


def test_clipping_scales_what_is_applied_and_leaves_the_gradients() -> None:
    parameters = [torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(2))]
    plain = [torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(2))]
    reference = torch.optim.AdamW(plain, lr=0.1, betas=(0.9, 0.95), weight_decay=0.01)
    optimizer = ClippedAdamW(
        [("a", parameters[0]), ("b", parameters[1])], betas=(0.9, 0.95), weight_decay=0.01, clip=0.5
    )
    optimizer.rate.fill_(0.1)
    for scale in (3.0, 0.01):
        gradients = [torch.full((3,), scale), torch.full((2,), -scale)]
        for each, gradient in zip(plain, gradients, strict=True):
            each.grad = gradient.clone()
        wanted = torch.nn.utils.clip_grad_norm_(plain, 0.5)
        reference.step()
        norm = optimizer.step(gradients)
        torch.testing.assert_close(norm, wanted)
        assert torch.equal(gradients[0], torch.full((3,), scale))
        torch.testing.assert_close(parameters, plain)
