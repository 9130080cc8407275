"""A piece of a step that is replayed as one CUDA graph; where there is no CUDA it is simply called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trainer.compile.failure import capture_error

Outputs = tuple[Tensor, ...]


class GraphPool:
    """The private memory of one worker's graphs, which they share: its pieces never run at the same time.

    One piece's intermediate values may lie where another's outputs do: what a piece gives back is to be copied before
    any other piece runs.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.handle: Any = torch.cuda.graph_pool_handle() if device.type == "cuda" else None


class RecordedPiece:
    """`function` reads and writes tensors that stay where they are; `what` names it for a person."""

    def __init__(self, function: Callable[[], Outputs], pool: GraphPool, what: str) -> None:
        self._function = function
        self._pool = pool
        self._what = what
        self._graph: torch.cuda.CUDAGraph | None = None
        self._outputs: Outputs = ()

    def warm_up(self, runs: int) -> None:
        """Run it, so that nothing is left to compile, tune or allocate. Raises ValueError on a default stream."""
        if self._pool.device.type == "cuda":
            self._own_stream()
        for _ in range(runs):
            self._function()

    def capture(self) -> None:
        """On CUDA, record it on the thread's current stream. Raises `CaptureError`."""
        if self._pool.device.type != "cuda":
            return
        stream = self._own_stream()
        graph = torch.cuda.CUDAGraph()
        try:
            # thread_local: what other threads do on other devices is none of this capture's business
            with torch.cuda.graph(graph, pool=self._pool.handle, stream=stream, capture_error_mode="thread_local"):
                outputs = self._function()
        except Exception as error:
            raise capture_error(self._what, self._pool.device, error) from error
        self._graph, self._outputs = graph, outputs
        graph.replay()

    def _own_stream(self) -> torch.cuda.Stream:
        stream = torch.cuda.current_stream(self._pool.device)
        if stream == torch.cuda.default_stream(self._pool.device):
            raise ValueError(f"{self._what}: a capture needs a stream of the thread's own (trainer.compile.own_device)")
        return stream

    def __call__(self) -> Outputs:
        """The outputs lie in the graphs' memory: copy them before this or another piece of the pool runs."""
        if self._graph is None:
            return self._function()
        self._graph.replay()
        return self._outputs
