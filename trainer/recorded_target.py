"""The target's forward in CUDA graphs, one for each batch shape.

Eager transformers code launches a target's kernels one by one and holds the interpreter's lock while it does so: the
target is then slower than its GPU, and every other thread of the process waits too. A replay is one launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trainer.compile import CaptureError
from trainer.compile.recorded import GraphPool, Outputs, RecordedPiece
from trainer.data import Rows
from trainer.target import Target
from trainer.transfer import send

_WARM_UPS = 2


class _Shape:
    """One batch shape: what its graph reads, and the graph."""

    def __init__(self, target: Target, rows: int, tokens: int, pool: GraphPool) -> None:
        self.input_ids = torch.zeros((rows, tokens), dtype=torch.long, device=target.device)
        self.lengths = torch.full((rows,), tokens, dtype=torch.long, device=target.device)
        masks: dict[int, Any] = {}
        self.what = f"the target's forward of {rows} x {tokens} tokens"

        def run() -> Outputs:
            with target.kept_masks(masks):
                return (target.features(self.input_ids, self.lengths),)

        # `run` holds the masks, which the graph reads
        self.piece = RecordedPiece(run, pool, self.what)
        self.piece.warm_up(_WARM_UPS)
        self.piece.capture()


class RecordedTarget:
    """`Target.features` for batches [rows, tokens] of the given shapes. Belongs to one thread, built inside the gate.

    Raises `CaptureError` where the forward cannot be captured, or where a replay's hidden states are not eager code's.
    """

    def __init__(self, target: Target, shapes: Sequence[tuple[int, int]]) -> None:
        self._target = target
        pool = GraphPool(target.device)
        # the largest first: the others fit into what it left
        self._shapes = {
            shape: _Shape(target, *shape, pool) for shape in sorted(shapes, key=lambda each: -each[0] * each[1])
        }
        for shape in self._shapes.values():
            self._prove(shape)

    @property
    def device(self) -> torch.device:
        """The target's."""
        return self._target.device

    def features_of(self, rows: Rows) -> Tensor:
        """See `Target.features_of`."""
        return self.features(send(rows.input_ids, self.device), send(rows.lengths, self.device))

    @torch.no_grad()
    def features(self, input_ids: Tensor, lengths: Tensor) -> Tensor:
        """See `Target.features`; the result is the caller's own."""
        shape = self._shapes[(input_ids.shape[0], input_ids.shape[1])]
        shape.input_ids.copy_(input_ids, non_blocking=True)
        shape.lengths.copy_(lengths, non_blocking=True)
        # the next replay writes into the same memory
        return shape.piece()[0].clone()

    def _prove(self, shape: _Shape) -> None:
        """On other tokens and lengths than those of the capture: a graph that reads elsewhere gives old ones."""
        rows, tokens = shape.input_ids.shape
        generator = torch.Generator().manual_seed(rows * tokens)
        vocabulary = int(self._target.config.vocab_size)
        input_ids = torch.randint(vocabulary, (rows, tokens), generator=generator)
        lengths = torch.randint(1, tokens + 1, (rows,), generator=generator)
        wanted = self._target.features(input_ids.to(self.device), lengths.to(self.device)).float()
        found = self.features(input_ids, lengths).float()
        error = float((found - wanted).norm() / wanted.norm())
        # other kernels may be chosen inside a graph: half of the digits must agree, as no other batch's do
        allowed = torch.finfo(self._target.embed_weight.dtype).eps ** 0.5
        if not error <= allowed:
            raise CaptureError(
                f"{shape.what}: a replay gives hidden states that differ from eager code's by {error:.1e} (relative; "
                f"{allowed:.1e} allowed). Set workload.target_forward: eager"
            )
