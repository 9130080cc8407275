"""Steady steps of all drafter threads at once, timed: the run's own steps, and nothing that looks at them."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import torch

from trainer.abort import Abort
from trainer.board import StepBoard, StepReport
from trainer.canary.batches import random_batches
from trainer.canary.clock import StepClock, median_step_ms
from trainer.compile import Gate, steady_phase
from trainer.nccl_exchange import exchange_between
from trainer.parts import Parts
from trainer.queues import OrderedQueue
from trainer.replica import DrafterReplica, build_replica
from trainer.step import Batch
from trainer.workers import DrafterWorker, TrainingPlan

_SETTLE, _LEAST, _MOST = 3, 8, 1000
"""Steps that are left out at the beginning, and steps that are timed: until it was long enough."""
_LONG_ENOUGH_S = 0.5
_RATE = 1e-6
_LOOK_S = 0.2
_STOP_S = 20.0


@dataclass(frozen=True)
class Timing:
    """`step_ms`: median of an optimiser step; `peak_bytes`: what torch's allocator held at most on the fullest GPU
    (frozen target included), None without one; `warm_up_s`: building, compiling, capturing."""

    step_ms: float
    steps: int
    samples_per_s: float
    peak_bytes: int | None
    warm_up_s: float


def time_steps(parts: Parts) -> Timing:
    """Steps at the longest bucket, exchange and update included. Raises `WorkerFailed`."""
    return _TimedRun(parts).run()


class _TimedRun:
    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._drafters = parts.placement.drafters
        self._micros = parts.settings.workload.accumulation
        self._abort = Abort()
        self._exchange = exchange_between(self._drafters, self._abort)
        self._clock = StepClock(len(self._drafters))
        self._asked = 0
        self._from = 0.0
        self._ready_at = 0.0

    def run(self) -> Timing:
        """See `time_steps`."""
        try:
            return self._run()
        finally:
            # this object and its compile gate hold each other, and the collector rests: let go of all parts here
            vars(self).clear()

    def _run(self) -> Timing:
        batches = [self._longest(worker) for worker in range(len(self._drafters))]
        gpus = sorted({device.index or 0 for device in self._drafters if device.type == "cuda"})
        for index in gpus:
            # the batches came on this thread's stream, and the workers have streams of their own
            torch.cuda.current_stream(index).synchronize()
            torch.cuda.reset_peak_memory_stats(index)
        started = time.monotonic()
        with steady_phase() as begin:

            def opened() -> None:
                self._exchange.open()
                self._ready_at = time.monotonic()
                begin()

            workers = self._workers(Gate(len(self._drafters), self._abort, on_open=opened), batches)
            for worker in workers:
                worker.start()
            self._join(workers)
        if self._abort.failure is not None:
            raise self._abort.failure
        # in the last step the loss is read back
        timed = [steps[_SETTLE:-1] for steps in self._clock.step_ms()]
        step_ms = median_step_ms(timed)
        return Timing(
            step_ms=step_ms,
            steps=len(timed[0]),
            samples_per_s=self._parts.schedule.samples_per_step / step_ms * 1e3,
            peak_bytes=max((torch.cuda.max_memory_reserved(index) for index in gpus), default=None),
            warm_up_s=self._ready_at - started,
        )

    def _longest(self, worker: int) -> list[Batch]:
        work = self._parts.settings.workload
        longest = replace(self._parts.settings, workload=replace(work, buckets=work.buckets[-1:]))
        return random_batches(replace(self._parts, settings=longest), worker, self._micros)

    def _workers(self, gate: Gate, batches: list[list[Batch]]) -> list[DrafterWorker]:
        board = StepBoard(len(self._drafters), _unwritten)
        plan = TrainingPlan(
            first_step=0,
            last_step=_SETTLE + 1 + _MOST,
            accumulation=self._micros,
            # the last step only: what is read back from a GPU makes its thread wait
            log_every=_SETTLE + 1 + _MOST,
            rate=lambda _step: _RATE,
            stop=self._enough,
            after_step=lambda worker, _done, _last: self._clock.tick(worker, self._drafters[worker]),
        )
        return [
            DrafterWorker(
                worker,
                device=device,
                build=self._build,
                queue=self._queue(batches[worker], plan.last_step),
                exchange=self._exchange,
                plan=plan,
                board=board,
                gate=gate,
                cpu_threads=self._parts.cpu_threads,
                abort=self._abort,
            )
            for worker, device in enumerate(self._drafters)
        ]

    def _build(self, worker: int) -> DrafterReplica:
        return build_replica(self._parts, worker)

    def _queue(self, batches: list[Batch], steps: int) -> OrderedQueue[Batch]:
        """The same batches for every step: nobody writes into them."""
        queue: OrderedQueue[Batch] = OrderedQueue(steps * self._micros, self._abort)
        for index in range(steps * self._micros):
            queue.put(index, batches[index % self._micros])
        return queue

    def _enough(self) -> bool:
        """Asked before each step: the one that follows is the last, once enough were timed."""
        if self._asked == _SETTLE:
            self._from = time.monotonic()
        self._asked += 1
        timed = self._asked - _SETTLE - 1
        return timed > _LEAST and time.monotonic() - self._from > _LONG_ENOUGH_S

    def _join(self, workers: list[DrafterWorker]) -> None:
        deadline: float | None = None
        while alive := [worker for worker in workers if worker.is_alive()]:
            alive[0].join(_LOOK_S)
            if self._abort.is_set():
                deadline = deadline or time.monotonic() + _STOP_S
                if time.monotonic() > deadline:
                    return


def _unwritten(_report: StepReport) -> None:
    """The board checks that the last step is finite; there is no metrics file here."""
