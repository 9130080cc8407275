"""The gate: the run's own drafter threads, replicas and exchange, on random data, all at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from trainer.abort import Abort
from trainer.board import StepBoard, StepReport
from trainer.canary.batches import random_batches
from trainer.canary.reference import AdamWRule
from trainer.canary.witness import (
    HiddenFunction,
    WatchedExchange,
    WatchedReplica,
    WatchedStep,
    WorkerRecord,
)
from trainer.compile import CompileEvent, CompileLog, Gate, GraphCounts, graph_counts, steady_phase
from trainer.errors import Aborted, WorkerFailed
from trainer.nccl_exchange import exchange_between
from trainer.parts import Parts, load_parts
from trainer.queues import OrderedQueue
from trainer.replica import build_replica
from trainer.settings import Settings
from trainer.step import Batch
from trainer.workers import DrafterWorker, TrainingPlan

RULE = AdamWRule(rate=1e-3, betas=(0.9, 0.95), weight_decay=0.01, clip=1.0)
_LOOK_S = 0.2
# the failed worker has woken all that wait; what still runs then is stuck in a computation
_STOP_S = 20.0


@dataclass
class GateRecord:
    """What was seen. `steady_from` is how many compiles had begun when the gate opened; None if it never did.

    `allocated[step][device index]` are bytes after each step, with every worker waiting. `graphs` are the counts at
    the gate's opening and at the end.
    """

    parts: Parts
    workers: list[WorkerRecord]
    compiles: list[CompileEvent]
    steady_from: int | None
    allocated: list[dict[int, int]]
    graphs: tuple[GraphCounts, GraphCounts] | None
    steps_done: list[int]
    failure: WorkerFailed | None
    hung: list[str]


def gate_settings(settings: Settings) -> Settings:
    """The settings with fixed training values: the verdict must not depend on `training`."""
    training = replace(
        settings.training,
        steps=settings.workload.canary_steps,
        learning_rate=RULE.rate,
        warmup_ratio=0.0,
        weight_decay=RULE.weight_decay,
        betas=RULE.betas,
        clip=RULE.clip,
        decay_gamma=None,
        seed=0,
        log_every=1,
        resume_from=None,
    )
    return replace(settings, training=training)


def run_gate(settings: Settings) -> GateRecord:
    """Build, compile and warm up one worker at a time, then take `canary_steps` steps with all. Raises `InputError`."""
    return _GateRun(load_parts(gate_settings(settings))).run()


class _GateRun:
    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        work = parts.settings.workload
        self._steps = work.canary_steps
        self._micros = work.accumulation
        drafters = len(parts.placement.drafters)
        self._records = [
            WorkerRecord(random_batches(parts, index, self._steps * self._micros)) for index in range(drafters)
        ]
        self._abort = Abort()
        self._exchange = exchange_between(parts.placement.drafters, self._abort)
        self._log = CompileLog()
        self._steady_from: int | None = None
        self._opened: GraphCounts | None = None
        self._allocated: list[dict[int, int]] = []
        self._between = threading.Barrier(drafters, action=self._measure)
        self._abort.subscribe(self._between.abort)

    def run(self) -> GateRecord:
        """See `run_gate`."""
        graph_counts()  # starts the counting
        for device in self._parts.placement.drafters:
            if device.type == "cuda":
                # the batches came on this thread's stream, and the workers have streams of their own
                torch.cuda.current_stream(device).synchronize()
        with self._log, steady_phase() as forbid:

            def opened() -> None:
                self._steady_from = len(self._log.events)
                self._exchange.open()
                self._opened = graph_counts()
                forbid()

            workers = self._workers(Gate(len(self._records), self._abort, on_open=opened))
            for worker in workers:
                worker.start()
            hung = self._join(workers)
            ended = graph_counts()
        return GateRecord(
            parts=self._parts,
            workers=self._records,
            compiles=self._log.events,
            steady_from=self._steady_from,
            allocated=self._allocated,
            graphs=None if self._opened is None else (self._opened, ended),
            steps_done=[worker.steps_done for worker in workers],
            failure=self._abort.failure,
            hung=hung,
        )

    def _workers(self, gate: Gate) -> list[DrafterWorker]:
        exchange = WatchedExchange(self._exchange, self._records)
        board = StepBoard(len(self._records), _unwritten)
        plan = TrainingPlan(
            first_step=0,
            last_step=self._steps,
            accumulation=self._micros,
            log_every=1,
            rate=lambda _step: RULE.rate,
            stop=lambda: False,
            after_step=self._after_step,
        )
        return [
            DrafterWorker(
                index,
                device=device,
                build=self._build,
                queue=self._queue(record.batches),
                exchange=exchange,
                plan=plan,
                board=board,
                gate=gate,
                cpu_threads=self._parts.cpu_threads,
                abort=self._abort,
            )
            for index, (device, record) in enumerate(zip(self._parts.placement.drafters, self._records, strict=True))
        ]

    def _queue(self, batches: Sequence[Batch]) -> OrderedQueue[Batch]:
        queue: OrderedQueue[Batch] = OrderedQueue(len(batches), self._abort)
        for index, batch in enumerate(batches):
            queue.put(index, batch)
        return queue

    def _build(self, worker: int) -> WatchedReplica:
        """In the worker's thread, inside the gate: the run's replica, and a compiled function for its outputs."""
        record, device = self._records[worker], self._parts.placement.drafters[worker]
        replica = build_replica(self._parts, worker)
        record.replica = replica
        record.names = tuple(name for name, _ in replica.drafter.named_parameters())
        hidden = HiddenFunction(self._parts, replica.drafter, self._parts.frozen[device], worker)
        buckets = {batch.input_ids.shape[1]: batch for batch in record.batches}
        for batch in buckets.values():
            for _ in range(self._parts.strategy.warm_up_calls):
                hidden(batch)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        return WatchedReplica(WatchedStep(replica.step, replica.drafter, hidden, record))

    def _after_step(self, worker: int, done: int, last: bool) -> None:
        try:
            self._between.wait()
        except threading.BrokenBarrierError:
            self._abort.check()
            raise Aborted(f"drafter {worker} waited after step {done} in vain") from None

    def _measure(self) -> None:
        devices = {each.index for each in self._parts.placement.drafters if each.type == "cuda"}
        self._allocated.append({index: torch.cuda.memory_allocated(index) for index in devices})

    def _join(self, workers: Sequence[DrafterWorker]) -> list[str]:
        """Wait for all; after a failure only so long. Returns the names of those that do not end."""
        deadline: float | None = None
        while alive := [worker for worker in workers if worker.is_alive()]:
            alive[0].join(_LOOK_S)
            if self._abort.is_set():
                deadline = deadline or time.monotonic() + _STOP_S
                if time.monotonic() > deadline:
                    return [worker.name for worker in alive]
        return []


def _unwritten(_report: StepReport) -> None:
    """The board checks that each step is finite; there is no metrics file in the gate."""
