"""The target's forward in CUDA graphs gives eager code's hidden states, in several threads, batch after batch."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.test_exchange import in_threads
from trainer.abort import Abort
from trainer.compile import CaptureError, Gate, graph_counts, own_device
from trainer.recorded_target import RecordedTarget
from trainer.target import Target

pytestmark = [pytest.mark.torch, pytest.mark.cuda]

GPU = torch.device("cuda:0")
SHAPES = [(3, 16), (3, 64)]


def batch(seed: int, rows: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(20, (rows, tokens), generator=generator), torch.randint(
        1, tokens + 1, (rows,), generator=generator
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layers", [(0, 2), (1, 4)])
def test_replays_are_the_eager_forward(
    tiny_target: Path, tmp_path: Path, layers: tuple[int, ...], dtype: torch.dtype
) -> None:
    target = Target.load(tiny_target, [GPU], dtype, layers, tmp_path)
    batches = [batch(seed, *SHAPES[seed % 2]) for seed in range(8)]
    gate = Gate(2, Abort())

    def work(index: int) -> Any:
        with own_device(GPU):
            with gate.exclusive(threading.current_thread().name):
                recorded = RecordedTarget(target, SHAPES)
            gate.pass_through()
            found = [recorded.features(*each) for each in batches[index:]]
            torch.cuda.current_stream(GPU).synchronize()
            return found

    before = graph_counts()
    found = in_threads(2, work, 200)
    after = graph_counts()
    for index, states in enumerate(found):
        assert not isinstance(states, BaseException), states
        for each, (ids, lengths) in zip(states, batches[index:], strict=True):
            wanted = target.features(ids.to(GPU), lengths.to(GPU))
            tolerance = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 3e-2, "atol": 3e-2}
            torch.testing.assert_close(each, wanted, **tolerance)
    # captured once a thread and shape; replayed at the capture, in its proof, and for each batch
    assert after.captures.get(0, 0) - before.captures.get(0, 0) == 4
    assert after.replays.get(0, 0) - before.replays.get(0, 0) == 4 + 4 + 8 + 7


def test_a_graph_that_reads_elsewhere_is_refused(tiny_target: Path, tmp_path: Path) -> None:
    target = Target.load(tiny_target, [GPU], torch.float32, (0, 2), tmp_path)
    eager = target.features

    def frozen(input_ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        # what a graph captures of a tensor that its caller then replaces
        recording = torch.cuda.is_current_stream_capturing()
        return eager(input_ids.clone().zero_() if recording else input_ids, lengths)

    target.features = frozen  # type: ignore[method-assign]
    with own_device(GPU), pytest.raises(CaptureError, match="differ from eager code's"):
        RecordedTarget(target, SHAPES[:1])
