"""A worker's thread stays near its GPU."""

from __future__ import annotations

import pytest
import torch

from trainer.compile import own_device
from trainer.pace import AHEAD, Pace

pytestmark = [pytest.mark.torch, pytest.mark.cuda]

GPU = torch.device("cuda:0")
CYCLES = 50_000_000


def test_no_more_than_two_steps_ahead() -> None:
    with own_device(GPU):
        pace, ended = Pace(GPU), []
        for step in range(3 * AHEAD):
            pace.wait()
            assert all(each.query() for each in ended[: max(0, step - AHEAD)])
            torch.cuda._sleep(CYCLES)
            pace.mark()
            ended.append(torch.cuda.current_stream(GPU).record_event())
        assert not ended[-1].query(), "it waits for every step"
