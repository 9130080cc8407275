"""The run itself: target workers feed drafter workers, replicas average their gradients, checkpoints and metrics.

`run` is the entry point of a run and of the canary's rehearsal: both take exactly this path.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from trainer.abort import Abort
from trainer.at_work import AtWork
from trainer.board import StepBoard, StepReport
from trainer.checkpoint import save_checkpoint
from trainer.compile import Gate, steady_phase
from trainer.errors import InputError
from trainer.evaluation_worker import EvaluationWorker
from trainer.files import write_json
from trainer.judge import Judgement, judge
from trainer.meter import MeteredStep, PipelineMeter
from trainer.metrics import Metrics
from trainer.nccl_exchange import exchange_between
from trainer.optimizer import learning_rate_at
from trainer.parts import Parts, available_cpus, load_parts, order_facts
from trainer.queues import Assignments, OrderedQueue
from trainer.replica import DrafterReplica, build_replica
from trainer.settings import CONTRACT, Settings
from trainer.step import Batch
from trainer.workers import DrafterWorker, TargetWorker, TrainingPlan, Worker

_QUEUE_DEPTH = 2
_JOIN_LOOK_S = 0.5
# after a failure everything that waits is woken at once; only a hung computation is still there after this
_STOP_S = 30.0

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunResult:
    """How a run ended. `checkpoint` is the last one's folder; `before`, `after` are None where not judged.

    `weights`, `optimizer`: what the checkpoint must hold, in memory itself and by the names that it has there.
    """

    outcome: Literal["completed", "stopped"]
    steps: int
    checkpoint: Path
    before: Judgement | None
    after: Judgement | None
    weights: dict[str, Tensor]
    optimizer: dict[str, Tensor]


def run(
    settings: Settings,
    out: Path,
    *,
    limit_steps: int | None = None,
    longest_first: bool = False,
    evaluate: bool = True,
    evaluate_stopped: bool = False,
    stop: Callable[[], bool] = lambda: False,
) -> RunResult:
    """Train as docs/trainer-contract.md says, into `out`.

    `limit_steps` ends after that many optimiser steps (the schedule stays that of the whole run); `longest_first` takes
    the longest rows, and judges on the longest sequence held out; `evaluate` judges the drafter at start and end and
    each `evaluate_every` steps, at the end of a stopped run only with `evaluate_stopped`; `stop` is asked before any
    thread starts and before each step whether to end with a checkpoint. Raises `InputError`, and `WorkerFailed` when a
    worker raised.
    """
    torch.set_num_threads(available_cpus())
    with _timed("loading"):
        parts = load_parts(settings, longest_first=longest_first, judged=evaluate)
    _refuse_later_checkpoints(out / "checkpoints", parts.start.step)
    with Metrics(out) as metrics:
        metrics.write("strategy", parts.start.step, strategy=parts.strategy.name)
        before = _judge(parts, parts.start.weights, metrics, "start", parts.start.step) if evaluate else None
        if not parts.targets and torch.cuda.is_initialized():
            # a target that was there to judge only: a capture cannot take memory that the allocator keeps
            torch.cuda.empty_cache()
        training = _Training(parts, out, metrics, limit_steps, stop, evaluate=evaluate)
        training.run()
        stopped = training.steps_done < training.last_step
        torch.set_num_threads(available_cpus())
        after = None
        if evaluate and (evaluate_stopped or not stopped):
            after = _judge(parts, training.weights(), metrics, "end", training.steps_done)
        result = RunResult(
            "stopped" if stopped else "completed",
            training.steps_done,
            training.checkpoint,
            before,
            after,
            training.weights(),
            training.optimizer(),
        )
    write_json(
        out / "result.json",
        {
            "contract": CONTRACT,
            "outcome": result.outcome,
            "steps": result.steps,
            "checkpoint": str(result.checkpoint.relative_to(out)),
            "before": before.summary() if before else None,
            "after": after.summary() if after else None,
        },
    )
    return result


class _Training:
    """The threads of one run, and what they share."""

    def __init__(
        self,
        parts: Parts,
        out: Path,
        metrics: Metrics,
        limit_steps: int | None,
        stop: Callable[[], bool],
        *,
        evaluate: bool,
    ) -> None:
        self._parts = parts
        self._out = out
        self._metrics = metrics
        self._stop = stop
        self._abort = Abort()
        self._meter = PipelineMeter(parts.placement.drafters, parts.placement.targets)
        self._exchange = exchange_between(parts.placement.drafters, self._abort)
        self._first = parts.start.step
        self.last_step = parts.settings.training.steps
        if limit_steps is not None:
            self.last_step = min(self.last_step, self._first + limit_steps)
        self._replicas: dict[int, DrafterReplica] = {}
        self._evaluates = evaluate and parts.settings.training.evaluate_every is not None and bool(parts.held_out)
        self._evaluation: EvaluationWorker | None = None
        self._queues: list[OrderedQueue[Batch]] = []
        self.steps_done = self._first
        self.checkpoint = out / "checkpoints"

    def run(self) -> None:
        """Start all workers and wait for their end. Raises `WorkerFailed`."""
        (self._out / "checkpoints").mkdir(parents=True, exist_ok=True)
        if self._stop():
            self._keep_start()
            return
        started = time.monotonic()

        def opened() -> None:
            self._exchange.open()
            begin()
            self._meter.start()
            log.info("warmed up in %.1f s", time.monotonic() - started)

        at_work = AtWork(self._out / "at_work.ndjson")
        with contextlib.closing(at_work), steady_phase() as begin:
            workers = self._workers(Gate(self._parties, self._abort, on_open=opened), at_work)
            for worker in workers:
                worker.start()
            self._join(workers)
        if self._abort.failure is not None:
            raise self._abort.failure

    @property
    def _parties(self) -> int:
        return len(self._parts.placement.drafters) + len(self._parts.placement.targets)

    def _workers(self, gate: Gate, at_work: AtWork) -> list[Worker]:
        parts, work, training = self._parts, self._parts.settings.workload, self._parts.settings.training
        drafters = parts.placement.drafters
        board = StepBoard(len(drafters), self._write_step)
        depth = max(_QUEUE_DEPTH, work.accumulation)
        self._queues = [OrderedQueue(depth, self._abort) for _ in drafters]
        assignments = Assignments(self._first, self.last_step, work.accumulation, len(drafters))
        plan = TrainingPlan(
            first_step=self._first,
            last_step=self.last_step,
            accumulation=work.accumulation,
            log_every=training.log_every,
            rate=lambda step: learning_rate_at(
                step, steps=training.steps, peak=training.learning_rate, warmup_ratio=training.warmup_ratio
            ),
            stop=self._stop,
            after_step=self._after_step,
            before_step=at_work.note,
        )
        workers: list[Worker] = [
            TargetWorker(
                index,
                devices=devices,
                source=parts.features_on(devices[0]),
                assignments=assignments,
                queues=self._queues,
                drafter_devices=drafters,
                maker=parts.maker,
                recorded=parts.recorded_shapes(devices[0]),
                gate=gate,
                meter=self._meter.targets[index],
                cpu_threads=parts.cpu_threads,
                abort=self._abort,
            )
            for index, devices in enumerate(parts.placement.target_groups)
        ]
        workers += [
            DrafterWorker(
                index,
                device=device,
                build=self._build,
                queue=self._queues[index],
                exchange=self._exchange,
                plan=plan,
                board=board,
                gate=gate,
                cpu_threads=parts.cpu_threads,
                abort=self._abort,
                meter=self._meter.drafters[index],
            )
            for index, device in enumerate(drafters)
        ]
        if self._evaluates:
            self._evaluation = EvaluationWorker(
                parts.placement.target_groups[0], self._judge_step, gate, parts.cpu_threads, self._abort
            )
            workers.append(self._evaluation)
        return workers

    def _build(self, worker: int) -> DrafterReplica:
        built = build_replica(self._parts, worker)
        self._replicas[worker] = replace(built, step=MeteredStep(built.step, self._meter.drafters[worker]))
        return self._replicas[worker]

    def _join(self, workers: list[Worker]) -> None:
        deadline: float | None = None
        # short joins: signal handlers run in this thread between them
        for worker in workers:
            while worker.is_alive():
                worker.join(_JOIN_LOOK_S)
                if self._abort.is_set():
                    deadline = deadline or time.monotonic() + _STOP_S
                    if time.monotonic() > deadline:
                        log.error("%s does not end", worker.name)
                        return

    def _write_step(self, report: StepReport) -> None:
        pipeline = self._meter.record()
        self._metrics.write(
            "step",
            report.step,
            loss=report.loss,
            first_slot_accuracy=report.first_slot_accuracy,
            learning_rate=report.learning_rate,
            grad_norm=report.grad_norm,
            samples=report.samples,
            workers=[
                {"worker": each.worker, "samples": list(each.samples), "wait_s": round(each.wait_s, 4)}
                for each in report.workers
            ],
            queue_depth=sum(len(each) for each in self._queues),
            pipeline=pipeline,
        )
        log.info(
            "step %d loss %.4f first slot %.3f, %.2f samples/s, drafters wait %.0f%%, targets %.0f%%",
            report.step,
            report.loss,
            report.first_slot_accuracy,
            pipeline["samples_per_s"],
            100 * pipeline["drafter_wait"],
            100 * pipeline["target_wait"],
        )

    def _after_step(self, worker: int, done: int, last: bool) -> None:
        if worker != 0:
            return
        self.steps_done = done
        if self._evaluation is not None:
            every = self._parts.settings.training.evaluate_every
            # the weights after the last step are judged at the end
            if not last and every is not None and done % every == 0:
                self._evaluation.send(done, self.weights())
            if last:
                self._evaluation.close()
        if last or done % self._parts.settings.training.checkpoint_every == 0:
            self._save(done, self.weights(), self.optimizer())

    def _judge_step(self, step: int, weights: dict[str, Tensor]) -> None:
        _judge(self._parts, weights, self._metrics, "step", step)

    def _keep_start(self) -> None:
        """Stopped before the first step: the start is what there is to keep."""
        self._save(self._parts.start.step, self.weights(), self.optimizer())

    def _save(self, step: int, weights: dict[str, Tensor], optimizer: dict[str, Tensor]) -> None:
        parts = self._parts
        position = parts.start.position + (step - self._first) * parts.schedule.samples_per_step
        resume = {
            **optimizer,
            "step": step,
            "position": position,
            "order": order_facts(parts.settings.training.seed, parts.data),
        }
        self.checkpoint = save_checkpoint(self._out / "checkpoints", step, weights, parts.drafter, resume)
        self._metrics.write("checkpoint", step, path=str(self.checkpoint.relative_to(self._out)))
        log.info("checkpoint %s", self.checkpoint.name)

    def weights(self) -> dict[str, Tensor]:
        """The first replica's weights (all replicas have the same), or the start's before there is one."""
        if 0 not in self._replicas:
            return self._parts.start.weights
        return dict(self._replicas[0].drafter.state_dict())

    def optimizer(self) -> dict[str, Tensor]:
        """The state of the first replica's optimiser, or the start's before there is one."""
        if 0 not in self._replicas:
            return self._parts.start.optimizer or {}
        return self._replicas[0].optimizer.state_tensors()


def _judge(parts: Parts, weights: dict[str, Tensor], metrics: Metrics, when: str, step: int) -> Judgement | None:
    where = f"step {step}" if when == "step" else f"the {when}"
    with _timed(f"evaluation at {where}"):
        found = judge(parts, weights)
    if found is not None:
        metrics.write("evaluation", step, when=when, **found.record())
        loss = "unknown" if found.loss is None else f"{found.loss:.3f}"
        log.info("%s: held-out loss %s, tau %.3f", where.removeprefix("the "), loss, found.decoding.tau)
    return found


def _refuse_later_checkpoints(folder: Path, step: int) -> None:
    """A resumed run must not meet checkpoints that an earlier attempt wrote after the one it continues from."""
    later = [each.name for each in sorted(folder.glob("step-*")) if (each / "manifest.json").is_file()]
    later = [name for name in later if int(name.removeprefix("step-")) > step]
    if later:
        raise InputError(
            f"{folder} already holds {later[-1]}, later than step {step}",
            "training.resume_from",
            f"resume from {folder / later[-1]}, or use an empty folder",
        )


class _timed:  # noqa: N801 -- reads as a statement
    """Logs how long a phase took."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        self._started = time.monotonic()

    def __exit__(self, *ended: object) -> None:
        log.info("%s took %.1f s", self._what, time.monotonic() - self._started)
