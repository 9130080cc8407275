"""The exchange between GPUs: right sums, the same bits everywhere, in the order of every worker's own stream."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from trainer.abort import Abort
from trainer.compile import own_device
from trainer.nccl_exchange import NcclExchange, exchange_between

from .test_exchange import in_threads

pytestmark = pytest.mark.cuda(2)


@pytest.mark.parametrize("per_gpu", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("together", [False, True])
def test_sums_over_gpus(per_gpu: int, dtype: torch.dtype, together: bool) -> None:
    gpus = torch.cuda.device_count()
    devices = [torch.device("cuda", index % gpus) for index in range(per_gpu * gpus)]
    exchange = exchange_between(devices, Abort())
    assert isinstance(exchange, NcclExchange)
    exchange.open()
    turns, size = 20, 3_000_000
    start = threading.Barrier(len(devices))

    def work(index: int) -> list[Any]:
        seen = []
        with own_device(devices[index]):
            if together:
                mine = list(torch.zeros(2 * size, device=devices[index], dtype=dtype).split(size))
            else:
                mine = [torch.zeros(size, device=devices[index], dtype=dtype) for _ in range(2)]
            busy = torch.ones(2048, 2048, device=devices[index])
            start.wait()
            for turn in range(turns):
                # the values are still being computed when the exchange is called
                for _ in range(10 * (index + 1)):
                    busy = (busy @ busy).clamp(0, 1)
                for number, each in enumerate(mine):
                    each.copy_(torch.full_like(each, 1.0 + index + turn + number) * busy[0, 0])
                exchange.gradients(index, mine)
                seen.append([each.detach().clone() for each in mine])
            return [[each.cpu() for each in pair] for pair in seen]

    found = in_threads(len(devices), work, 120)
    for turn in range(turns):
        for number in range(2):
            wanted = sum(1.0 + index + turn + number for index in range(len(devices)))
            for each in found:
                assert not isinstance(each, BaseException), each
                torch.testing.assert_close(each[turn][number], torch.full((size,), wanted, dtype=dtype))
                assert torch.equal(each[turn][number], found[0][turn][number]), "replicas differ"
