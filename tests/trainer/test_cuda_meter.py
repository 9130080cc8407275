"""Time on a GPU is the stream's, not the thread's, and reading it waits for nothing."""

from __future__ import annotations

import pytest
import torch

from trainer.compile import own_device
from trainer.meter import Meter

pytestmark = [pytest.mark.torch, pytest.mark.cuda]

CYCLES = 200_000_000


def test_a_span_is_what_the_stream_worked() -> None:
    device = torch.device("cuda:0")
    with own_device(device):
        meter = Meter(device)
        with meter.span("busy"):
            torch.cuda._sleep(CYCLES)
        # the thread is far ahead of the stream: nothing is known yet
        assert meter.take().busy_s == 0.0
        torch.cuda.current_stream(device).synchronize()
        with meter.span("wait"):
            pass
        spent = meter.take()
    assert spent.busy_s > 0.02
    assert spent.wait_s < spent.busy_s
