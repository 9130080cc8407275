"""The canary: every worker against a single-thread reference, then a rehearsal of the run itself."""

from __future__ import annotations

import faulthandler
import os
import queue
import random
import sys
import threading
import traceback
from array import array
from dataclasses import replace
from pathlib import Path

from . import checkpoint, compare, errors
from .evidence import FAIL, INCONCLUSIVE, NOT_CHECKED, PASS, Check, Evidence
from .exchange import Exchange
from .model import Block, Parameters, Shape, fresh
from .optimizer import AdamW, learning_rate
from .pipeline import WorkerFailed, run
from .reference import Reference, ReferenceAdamW, mean_gradient, recompute
from .settings import Settings, Training
from .stopping import TermAfter, stopped_by_term
from .target import load_target, mask_id
from .team import Team
from .tuning import kept_table
from .workers import Batch, DrafterWorker, Seen, copy, decay_gamma


def canary(settings: Settings, out: Path) -> int:
    """Prove the workload here; returns the exit code after `evidence.json` is on disk."""
    evidence = Evidence(out, settings.workload.strategy, kept_table(settings))
    watchdog = _watchdog(evidence, settings.workload.canary_timeout_s)
    workers, steps = settings.workload.drafter_threads, settings.workload.canary_steps
    why = "this trainer has no CUDA"
    for name in ("cuda_graphs", "compile", "memory", "throughput", "health"):
        evidence.add(Check(name, None, NOT_CHECKED, why))
    prove(settings, evidence)
    if evidence.outcome == PASS:
        _rehearse(settings, out / "rehearsal", evidence)
    watchdog.cancel()
    worst = max((check.figures.get("worst", 0.0) for check in evidence.checks if check.outcome == PASS), default=0)
    good = f"{workers} workers, {steps} steps: within {worst:.1e} of the reference, rehearsal done"
    first = next((check for check in evidence.checks if check.outcome in (FAIL, INCONCLUSIVE)), None)
    return evidence.write(f"{first.id}: {first.summary}" if first else good)


def prove(settings: Settings, evidence: Evidence) -> None:
    """Judge every worker against the reference, whatever `training` says: the verdict must not hang on it."""
    _gate(replace(settings, training=Training(steps=settings.workload.canary_steps)), evidence)


def _watchdog(evidence: Evidence, seconds: int) -> threading.Timer:
    def bite() -> None:
        sys.stderr.write(f"canary: nothing came to an end in {seconds} s; the stack of every thread:\n")
        sys.stderr.flush()
        faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
        summary = f"not done after {seconds} s; every thread's stack is in the log"
        evidence.add(Check("watchdog", None, FAIL, summary))
        os._exit(evidence.write(f"watchdog: {summary}"))

    timer = threading.Timer(seconds, bite)
    timer.daemon = True
    timer.name = "watchdog"
    timer.start()
    return timer


def _gate(settings: Settings, evidence: Evidence) -> None:
    shape = _shape(settings)
    seen: list[list[Seen]] = [[] for _ in range(settings.workload.drafter_threads)]
    team = Team(len(seen))
    exchange = Exchange(team, len(seen))
    parameters = fresh(shape, random.Random("canary/parameters"))
    drafters = []
    for index, observed in enumerate(seen):
        feed: queue.Queue[Batch] = queue.Queue()
        for number in range(settings.workload.canary_steps * settings.workload.accumulation):
            feed.put(Batch(_random_blocks(settings, shape, index, number), [number]))
        own = copy(parameters)
        optimizer = AdamW.fresh(settings.training, own)
        steps = (0, settings.workload.canary_steps)
        drafters.append(DrafterWorker(index, settings, own, optimizer, [feed], exchange, team, *steps, observed.append))
    for drafter in drafters:
        team.start(f"drafter-{drafter.index}", drafter.run)
    try:
        for step in range(settings.workload.canary_steps):
            if step:
                team.go()
            team.stepped()
        team.stopping = True
        team.go()
    except threading.BrokenBarrierError:
        team.join()
        for failure in team.failures:
            worker = int(failure.worker.rpartition("-")[2])
            evidence.add(Check("worker", worker, FAIL, failure.traceback.strip()))
        return
    team.join()
    for drafter in drafters:
        good = drafter.moved == settings.workload.canary_steps
        summary = f"{drafter.moved} of {settings.workload.canary_steps} steps done"
        evidence.add(Check("moved", drafter.index, PASS if good else FAIL, summary))
    _judge(settings, seen, evidence)


def _shape(settings: Settings) -> Shape:
    target = load_target(settings.workload.target)
    mask = mask_id(target, settings.workload.mask_token)
    return Shape(len(target.tokens), target.width, settings.workload.block_size, mask)


def _random_blocks(settings: Settings, shape: Shape, worker: int, number: int) -> list[Block]:
    generator = random.Random(f"canary/{worker}/{number}")
    gamma = decay_gamma(settings.training, shape.block_size)
    blocks = []
    for _ in range(min(settings.workload.anchors, 8) * settings.workload.batch_size):
        hidden = [generator.gauss(0, 1) for _ in range(shape.width)]
        slots = range(1, shape.block_size)
        weights = [2.718281828459045 ** (-(slot - 1) / gamma) for slot in slots]
        blocks.append(Block(hidden, [(generator.randrange(shape.vocabulary), weight) for weight in weights]))
    return blocks


def _judge(settings: Settings, seen: list[list[Seen]], evidence: Evidence) -> None:
    """Compare each worker's every step; the weights of the reference are the worker's own."""
    count = settings.workload.canary_steps
    references = [[recompute(one.before, one.blocks) for one in worker] for worker in seen]
    others = [[recompute(one.before, one.blocks, backwards=True) for one in worker] for worker in seen]
    means = [mean_gradient([worker[step] for worker in references]) for step in range(count)]
    swapped = [mean_gradient([worker[step] for worker in reversed(others)]) for step in range(count)]
    for index, worker in enumerate(seen):
        mine, other = references[index], others[index]
        _outputs(index, worker, mine, other, evidence)
        noise = max(compare.named(b.gradient, a.gradient).worst for a, b in zip(mine, other))
        gradients = [compare.named(one.output.gradient, a.gradient) for one, a in zip(worker, mine)]
        _distance("gradients", index, gradients, noise, evidence)
        noise = max(compare.named(b, a).worst for a, b in zip(means, swapped))
        exchanged = [compare.named(one.averaged.gradient, mean) for one, mean in zip(worker, means)]
        _distance("exchange", index, exchanged, noise, evidence)
        end = _trained(settings, worker[0].before, means)
        noise = compare.named(_trained(settings, worker[0].before, swapped), end).worst
        _distance("parameters", index, [compare.named(worker[-1].after, end)], noise, evidence)
    _negative_control(seen[-1][0], references[-1][0], others[-1][0], evidence)


def _outputs(index: int, worker: list[Seen], mine: list[Reference], other: list[Reference], evidence: Evidence) -> None:
    noise = max(compare.rows(b.outputs, a.outputs).worst for a, b in zip(mine, other))
    found = [compare.rows(one.output.outputs, a.outputs) for one, a in zip(worker, mine)]
    _distance("outputs", index, found, noise, evidence)
    noise = max(compare.vectors([b.loss_sum], [a.loss_sum]) for a, b in zip(mine, other))
    losses = [
        compare.Distance(compare.vectors([one.output.loss_sum], [a.loss_sum]), "loss") for one, a in zip(worker, mine)
    ]
    _distance("loss", index, losses, noise, evidence)


def _distance(name: str, worker: int, found: list[compare.Distance], noise: float, evidence: Evidence) -> None:
    worst = max(found, key=lambda distance: distance.worst)
    allowed = compare.tolerance(noise)
    step = found.index(worst) + 1
    summary = f"worst {worst.worst:.1e} in {worst.name} at step {step}, allowed {allowed:.1e}"
    evidence.distance(name, worker, worst.worst, allowed, summary)


def _trained(settings: Settings, start: Parameters, gradients: list[Parameters]) -> Parameters:
    optimizer = ReferenceAdamW(settings.training, [])
    parameters = start
    for step, gradient in enumerate(gradients, 1):
        parameters = optimizer.update(parameters, gradient, learning_rate(settings.training, step))
    return parameters


def _negative_control(one: Seen, reference: Reference, other: Reference, evidence: Evidence) -> None:
    """A gradient that is wrong by 1% in one parameter must be noticed, or the comparison is worth nothing."""
    broken = copy(one.output.gradient)
    name = max(broken, key=lambda key: max(abs(value) for value in broken[key]))
    broken[name] = [value * 1.01 for value in broken[name]]
    allowed = compare.tolerance(compare.named(other.gradient, reference.gradient).worst)
    found = compare.named(broken, reference.gradient)
    noticed = found.worst > allowed and found.name == name
    summary = f"{name} made wrong by 1%: " + ("noticed" if noticed else "not noticed")
    figures = {"worst": found.worst, "tolerance": allowed}
    evidence.add(Check("negative_control", None, PASS if noticed else INCONCLUSIVE, summary, figures))


def _rehearse(settings: Settings, out: Path, evidence: Evidence) -> None:
    """Take a few steps through the run's own entry point, longest rows first, to SIGTERM; read its checkpoint back."""
    out.mkdir()
    steps = settings.workload.rehearsal_steps
    stop = TermAfter(steps)
    try:
        with stopped_by_term(stop):
            result = run(settings, out, stop, limit_steps=steps + 1, longest_first=True)
        target = load_target(settings.workload.target)
        _, loaded = checkpoint.load(result.checkpoint, target, "rehearsal")
    except WorkerFailed as error:
        evidence.add(Check("rehearsal", None, FAIL, error.failure.traceback.strip()))
        return
    except errors.InputError:
        raise  # refused settings are not a verdict
    except Exception:
        text = traceback.format_exc()
        sys.stderr.write(text)
        evidence.add(Check("rehearsal", None, FAIL, text.strip()))
        return
    evidence.add(Check("rehearsal", None, PASS, f"{steps} steps through the run's own entry point"))
    stored = {name: array("f", values).tolist() for name, values in result.parameters.items()}
    same = loaded == stored
    summary = "loads back as it was in memory" if same else "does not load back as it was in memory"
    evidence.add(Check("checkpoint", None, PASS if same else FAIL, summary))
    stopped = result.outcome == "stopped" and result.steps == result.first + steps
    summary = f"SIGTERM after step {steps}: the run says {result.outcome!r} at step {result.steps}"
    evidence.add(Check("sigterm", None, PASS if stopped else FAIL, summary))
