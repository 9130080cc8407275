"""The run: threads, steps, metrics, checkpoints, result."""

from __future__ import annotations

import queue
import random
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import checkpoint, files
from .at_work import AtWork
from .data import Sampler, load_rows
from .evaluate import evaluate
from .exchange import Exchange
from .metrics import Metrics
from .model import Parameters, Shape, fresh
from .optimizer import AdamW
from .settings import Settings
from .target import Target, load_target, mask_id
from .team import Failure, Team
from .workers import QUEUE_ROOM, Batch, DrafterWorker, TargetWorker, copy


class WorkerFailed(Exception):
    """A worker's exception ended the run."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(f"{failure.worker} failed")
        self.failure = failure


@dataclass(frozen=True)
class RunResult:
    """How a run ended after which steps (those before it began among them), and its last parameters in memory."""

    outcome: str
    first: int
    steps: int
    checkpoint: Path
    parameters: Parameters


def run(
    settings: Settings,
    out: Path,
    stop: threading.Event,
    limit_steps: int | None = None,
    longest_first: bool = False,
) -> RunResult:
    """Train into `out`; `limit_steps` and `longest_first` are for the canary's rehearsal."""
    training = settings.training
    target = load_target(settings.workload.target)
    mask = mask_id(target, settings.workload.mask_token)
    shape = Shape(len(target.tokens), target.width, settings.workload.block_size, mask)
    rows = load_rows(settings, mask)
    sampler = Sampler(rows, settings.workload, training.seed, longest_first)
    first, parameters, optimizer = _start(settings, shape)
    last = first + limit_steps if limit_steps else training.steps
    metrics = Metrics(out / "metrics.ndjson")
    metrics.write("strategy", first, strategy=settings.workload.strategy)
    before = evaluate(settings, target, shape, parameters)
    if before:
        metrics.write("evaluation", first, when="start", **before.to_json())
    team = Team(settings.workload.drafter_threads)
    at_work = AtWork(out / "at_work.ndjson")
    drafters, queues = _workers(settings, target, sampler, team, parameters, optimizer, (first, last), at_work)
    step = first
    saved: Path | None = None
    try:
        while step < last and not stop.is_set():
            if step > first:
                team.go()
            team.stepped()
            step += 1
            if step % training.log_every == 0 or step == last:
                metrics.write("step", step, **_step_record(drafters, queues))
            saved = None
            every = training.evaluate_every
            if every is not None and step < last and step % every == 0:
                judged = evaluate(settings, target, shape, drafters[0].parameters)
                if judged:
                    metrics.write("evaluation", step, when="step", **judged.to_json())
            if step % training.checkpoint_every == 0:
                saved = _save(out, step, shape, drafters[0], metrics)
        team.stopping = True
        if step > first:
            team.go()
    except threading.BrokenBarrierError:
        team.join()
        raise WorkerFailed(team.failures[0]) from None
    finally:
        team.abort()  # target workers may still wait for room in a queue
    team.join()
    if saved is None:
        saved = _save(out, step, shape, drafters[0], metrics)
    after = evaluate(settings, target, shape, drafters[0].parameters)
    if after and step == last:
        metrics.write("evaluation", step, when="end", **after.to_json())
    outcome = "completed" if step == last else "stopped"
    result = {
        "contract": 1,
        "outcome": outcome,
        "steps": step,
        "checkpoint": saved.relative_to(out).as_posix(),
        "before": before.summary() if before else None,
        "after": after.summary() if after and step == last else None,
    }
    files.write_json(out / "result.json", result)
    metrics.close()
    return RunResult(outcome, first, step, saved, copy(drafters[0].parameters))


def _start(settings: Settings, shape: Shape) -> tuple[int, Parameters, AdamW]:
    training = settings.training
    if training.resume_from is not None:
        return checkpoint.load_resume(Path(training.resume_from), shape, training)
    if training.init_from is not None:
        parameters = checkpoint.load_first(Path(training.init_from), shape)
        return 0, parameters, AdamW.fresh(training, parameters)
    parameters = fresh(shape, random.Random(f"{training.seed}/parameters"))
    return 0, parameters, AdamW.fresh(training, parameters)


def _workers(
    settings: Settings,
    target: Target,
    sampler: Sampler,
    team: Team,
    parameters: Parameters,
    optimizer: AdamW,
    span: tuple[int, int],
    at_work: AtWork,
) -> tuple[list[DrafterWorker], list[list[queue.Queue[Batch]]]]:
    """Start every thread; each replica gets copies of its own."""
    shape = settings.workload
    targets = range(shape.target_workers)
    queues: list[list[queue.Queue[Batch]]] = [
        [queue.Queue(QUEUE_ROOM) for _ in targets] for _ in range(shape.drafter_threads)
    ]
    exchange = Exchange(team, shape.drafter_threads)
    drafters = []
    for index in range(shape.drafter_threads):
        own = AdamW(settings.training, copy(optimizer.first), copy(optimizer.second), optimizer.step)
        drafter = DrafterWorker(index, settings, copy(parameters), own, queues[index], exchange, team, *span)
        drafter.at_work = at_work
        drafters.append(drafter)
    for index in targets:
        worker = TargetWorker(index, settings, target, sampler, queues, team, *span)
        team.start(f"target-{index}", worker.run)
    for drafter in drafters:
        team.start(f"drafter-{drafter.index}", drafter.run)
    return drafters, queues


def _step_record(drafters: list[DrafterWorker], queues: list[list[queue.Queue[Batch]]]) -> dict[str, Any]:
    reports = [drafter.report for drafter in drafters if drafter.report]
    whole = reports[0].averaged
    return {
        "loss": whole.loss,
        "first_slot_accuracy": whole.first_correct / max(1, whole.first_count),
        "learning_rate": reports[0].learning_rate,
        "grad_norm": reports[0].grad_norm,
        "samples": sum(len(report.rows) for report in reports),
        "workers": [
            {"worker": index, "samples": report.rows, "wait_s": round(report.wait_s, 6)}
            for index, report in enumerate(reports)
        ],
        "queue_depth": sum(place.qsize() for places in queues for place in places),
    }


def _save(out: Path, step: int, shape: Shape, drafter: DrafterWorker, metrics: Metrics) -> Path:
    folder = checkpoint.save(out, step, shape, drafter.parameters, drafter.optimizer)
    metrics.write("checkpoint", step, path=folder.relative_to(out).as_posix())
    return folder
