"""The gate: the run's own drafter threads, replicas and exchange, on random data, all at once.

The workers stand still before their first step and after each one; this thread then judges what they did, and drops it.
Everything that a worker does first in the steady phase, all do at the same moment: they are let go together.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from trainer.abort import Abort
from trainer.board import StepBoard
from trainer.canary.batches import random_batches
from trainer.canary.evidence import Check
from trainer.canary.numbers import NumbersJudge
from trainer.canary.reported import ReportedLoss
from trainer.canary.standstill import Standstill
from trainer.canary.state import StateWatch
from trainer.canary.update import RULE
from trainer.canary.witness import HiddenFunction, Latecomer, WatchedExchange, WatchedReplica, WatchedStep, WorkerRecord
from trainer.compile import (
    CompileEvent,
    CompileLog,
    DrawLog,
    Gate,
    GraphCounts,
    generators_put_back,
    graph_counts,
    steady_phase,
)
from trainer.errors import WorkerFailed
from trainer.nccl_exchange import exchange_between
from trainer.parts import Parts, load_parts
from trainer.queues import OrderedQueue
from trainer.replica import build_replica
from trainer.settings import Settings
from trainer.step import Batch
from trainer.workers import DrafterWorker, TrainingPlan

_LOOK_S = 0.2
# the failed worker has woken all that wait; what still runs then is stuck in a computation
_STOP_S = 20.0


@dataclass
class GateRecord:
    """What was seen. `steady_from` is how many compiles had begun when the gate opened; None if it never did.

    With every worker standing still: `graphs` are the counts before the first step and after each, `allocated` the
    bytes by CUDA device index after each step, `pools` the private memory pools by device index before the first.
    `findings` are those on numbers and on what makes them wrong.
    """

    parts: Parts
    workers: list[WorkerRecord]
    compiles: list[CompileEvent]
    steady_from: int | None
    allocated: list[dict[int, int]]
    graphs: list[GraphCounts]
    pools: dict[int, int]
    findings: list[Check]
    steps_done: list[int]
    failure: WorkerFailed | None
    hung: list[str]


def gate_settings(settings: Settings) -> Settings:
    """The settings with fixed training values: the verdict must not depend on `training`."""
    training = replace(
        settings.training,
        steps=settings.workload.canary_steps,
        learning_rate=RULE.peak,
        warmup_ratio=0.0,
        weight_decay=RULE.weight_decay,
        betas=RULE.betas,
        clip=RULE.clip,
        decay_gamma=None,
        seed=0,
        log_every=1,
        resume_from=None,
        init_from=None,
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
        self._late = Latecomer(drafters)
        self._exchange = exchange_between(parts.placement.drafters, self._abort, self._late.between)
        self._log = CompileLog()
        self._draws = DrawLog()
        self._steady_from: int | None = None
        self._still = Standstill(drafters, self._abort)
        self._numbers = NumbersJudge(parts, self._records)
        self._state = StateWatch(parts, self._records, self._draws)
        self._reported = ReportedLoss(self._records)
        self._graphs: list[GraphCounts] = []
        self._allocated: list[dict[int, int]] = []
        self._pools: dict[int, int] = {}

    def run(self) -> GateRecord:
        """See `run_gate`."""
        graph_counts()  # starts the counting
        for device in self._parts.placement.drafters:
            if device.type == "cuda":
                # the batches came on this thread's stream, and the workers have streams of their own
                torch.cuda.current_stream(device).synchronize()
        with self._log, self._draws, steady_phase() as begin:

            def opened() -> None:
                self._steady_from = len(self._log.events)
                self._exchange.open()
                begin()

            workers = self._workers(Gate(len(self._records), self._abort, on_open=opened))
            for worker in workers:
                worker.start()
            self._watch(workers)
            hung = self._join(workers)
        record = GateRecord(
            parts=self._parts,
            workers=self._records,
            compiles=self._log.events,
            steady_from=self._steady_from,
            allocated=self._allocated,
            graphs=self._graphs,
            pools=self._pools,
            findings=[
                *self._state.causes(),
                *self._numbers.report(),
                *self._state.sameness(),
                *self._reported.report(),
            ],
            steps_done=[worker.steps_done for worker in workers],
            failure=self._abort.failure,
            hung=hung,
        )
        # this object and its compile gate hold each other, and the collector rests: let go of the replicas here
        vars(self).clear()
        return record

    def _watch(self, workers: Sequence[DrafterWorker]) -> None:
        """Look before the first step and after each, until the last or a worker's failure."""
        for done in range(self._steps + 1):
            if not self._still.wait_for_all(lambda: all(worker.is_alive() for worker in workers)):
                return
            try:
                self._look(done)
            except BaseException as error:
                # the workers stand still and must be let go, whatever happened here
                self._abort.fail("the canary", error)
                raise
            if not self._still.let_go():
                return

    def _look(self, done: int) -> None:
        """At everything, after `done` steps."""
        self._graphs.append(graph_counts())
        differ = self._state.look(done)
        if done > 0:
            self._reported.look(done)
            self._numbers.judge(done - 1, differ)
        if differ:
            self._numbers.end()
        if done < self._steps:
            self._numbers.begin_step()
        devices = {each.index or 0 for each in self._parts.placement.drafters if each.type == "cuda"}
        if done == 0:
            self._pools = private_pools() if devices else {}
            return
        # last, so that what the reference keeps (a workspace) is in the first step's figure too
        self._allocated.append({index: torch.cuda.memory_allocated(index) for index in devices})

    def _workers(self, gate: Gate) -> list[DrafterWorker]:
        exchange = WatchedExchange(self._exchange, self._records, self._late)
        board = StepBoard(len(self._records), self._reported.write)
        plan = TrainingPlan(
            first_step=0,
            last_step=self._steps,
            accumulation=self._micros,
            log_every=1,
            rate=RULE.rate,
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
        hidden = HiddenFunction(self._parts, replica.drafter, self._parts.frozen[device], worker)
        buckets = {batch.input_ids.shape[1]: batch for batch in record.batches}
        with generators_put_back([device]):
            for batch in buckets.values():
                for _ in range(self._parts.strategy.warm_up_calls):
                    hidden(batch)
        self._rest(worker)
        return WatchedReplica(WatchedStep(replica.step, hidden, record, lambda: self._stop(worker)))

    def _rest(self, worker: int) -> None:
        """Nothing of this thread is left running on its device."""
        device = self._parts.placement.drafters[worker]
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()

    def _stop(self, worker: int) -> None:
        self._rest(worker)
        self._still.stop()

    def _after_step(self, worker: int, _done: int, _last: bool) -> None:
        self._stop(worker)

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


def private_pools() -> dict[int, int]:
    """How many memory pools of CUDA graphs there are, by device index."""
    pools = {
        (segment["device"], tuple(segment["segment_pool_id"]))
        for segment in torch.cuda.memory_snapshot()
        if tuple(segment["segment_pool_id"]) != (0, 0)
    }
    return dict(Counter(device for device, _ in pools))
