"""The whole step in CUDA graphs that are captured by hand, from the raw batch to the updated parameters.

The inputs are copied into held memory; what is prepared of them, forward, backward and update are inside the graphs.
With one replica the update is in the last micro-batch's graph; with several it is a graph of its own, after the
exchange. Which micro-batch it is (first, last) and its bucket choose the graph.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from trainer.compile.base_step import BaseStep
from trainer.compile.held_inputs import HeldInputs
from trainer.compile.plan import StepPlan
from trainer.compile.recorded import GraphPool, Outputs, RecordedPiece
from trainer.compile.strategy import Strategy

_Key = tuple[int, bool, bool]


class WholeStep(BaseStep):
    """A `CompiledStep` of recorded pieces. On a CPU the same pieces run, and nothing is recorded."""

    def __init__(self, plan: StepPlan, strategy: Strategy) -> None:
        super().__init__(plan, strategy)
        self._alone = plan.replicas == 1
        self._held = [HeldInputs(each, self._definition.prepare) for each in plan.examples]
        if len(self._held) == 1 and self.rate.device.type == "cuda" and not self._gradients.together:
            module = self._definition.module
            self._gradients.take_captured(
                [*module.parameters(), *module.buffers(), *self._definition.constants, *self._held[0].tensors]
            )
        pool = GraphPool(self.rate.device)
        self._pieces = {
            key: RecordedPiece(self._micro_batch(*key), pool, f"{plan.name}, {self._text(*key)}")
            for key in self._keys()
        }
        self._update = RecordedPiece(self._updating(), pool, f"{plan.name}, the update")
        self._norm: Tensor | None = None

    def _keys(self) -> list[_Key]:
        """Bucket, first, last; the bucket that needs most memory first, so that the others fit into what it left."""
        count = self._plan.accumulation
        places = dict.fromkeys((number == 0, self._alone and number == count - 1) for number in range(count))
        sizes = [sum(each.nbytes for each in example) for example in self._plan.examples]
        order = sorted(range(len(sizes)), key=lambda index: -sizes[index])
        return [(bucket, *place) for bucket in order for place in places]

    def _text(self, bucket: int, first: bool, last: bool) -> str:
        shape = list(self._plan.examples[bucket][0].shape)
        parts = ["zero"] * first + ["forward", "backward"] + ["update"] * last
        return f"{', '.join(parts)} of bucket {bucket} (first input {shape})"

    # What these return does not hold the step: who lets go of a step lets go of its graphs and their memory, without
    # waiting for the collector, which is kept away from compiled code.

    def _micro_batch(self, bucket: int, first: bool, last: bool) -> Callable[[], Outputs]:
        loss_of, held, gradients, update = self._losses[bucket], self._held[bucket], self._gradients, self._updating()

        def run() -> Outputs:
            loss, seen = loss_of(*held.prepared().arguments)
            gradients.backward(loss, first=first)
            return (seen.detach(), *(update() if last else ()))

        return run

    def _updating(self) -> Callable[[], Outputs]:
        optimizer, gradients = self._definition.optimizer, self._gradients
        # not its tensors: a capture may put others in their place
        return lambda: (optimizer.step(gradients.tensors),)

    def accumulate(self, *inputs: Tensor, first: bool, last: bool) -> Tensor:
        """See `CompiledStep`."""
        bucket = self._bucket(inputs)
        piece = self._pieces.get((bucket, first, self._alone and last))
        if piece is None:
            raise ValueError(
                f"{self._plan.name} was built for {self._plan.accumulation} micro-batches a step: none of them is "
                f"first={first}, last={last}"
            )
        self._held[bucket].load(inputs)
        seen, *norm = piece()
        self._norm = norm[0] if norm else None
        # the next replay writes its outputs into the same memory again: keep a copy
        return seen.clone()

    def update(self) -> Tensor:
        """See `CompiledStep`. With one replica it has happened already, in the last `accumulate`."""
        if not self._alone:
            self._norm = self._update()[0]
        if self._norm is None:
            raise RuntimeError(f"{self._plan.name}: update comes after the last micro-batch, and once")
        norm, self._norm = self._norm.clone(), None
        return norm

    def warm_up(self) -> None:
        """Run every piece, then record every piece. Changes parameters and optimiser."""
        pieces = [*self._pieces.values(), *([] if self._alone else [self._update])]
        for piece in pieces:
            piece.warm_up(self._strategy.warm_up_calls)
        for piece in pieces:
            piece.capture()
        self._gradients.zero()
