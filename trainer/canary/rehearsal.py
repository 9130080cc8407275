"""The rehearsal: a few steps of the run's own entry point, and its checkpoint read back."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from trainer.canary.evidence import Check, Evidence, Outcome
from trainer.canary.gate import GateRecord
from trainer.canary.out_of_memory import explained
from trainer.checkpoint import load_checkpoint, load_resume, save_checkpoint
from trainer.errors import InputError, WorkerFailed, told_whole
from trainer.settings import Settings, Training
from trainer.stopping import Term, TermAfter
from trainer.train_dflash_pipeline import RunResult, run

_EVALUATION_TOKENS = 4


def rehearse(settings: Settings, out: Path, evidence: Evidence) -> None:
    """Real target, real rows (the longest), queues, exchange, evaluation, SIGTERM and checkpoint, in `out`.

    The checkpoints are removed when they passed: they are as large as the run's.
    """
    steps = settings.workload.rehearsal_steps
    # decoding is rehearsed too, but not at full length
    tokens = min(_EVALUATION_TOKENS, settings.training.evaluation_tokens)
    # one step more than it takes: what ends it is the signal
    training = replace(_room_for(settings.training, steps + 1), evaluation_tokens=tokens)
    if training.evaluate_every is not None:
        # beside training, as in the run
        training = replace(training, evaluate_every=1)
    out.mkdir()
    term = Term()
    stop = TermAfter(term, steps)
    try:
        with term.listening():
            result = run(
                replace(settings, training=training),
                out,
                limit_steps=steps + 1,
                longest_first=True,
                stop=stop,
                evaluate_stopped=True,
            )
    except WorkerFailed as failed:
        # its traceback is in the log already
        evidence.add(Check("rehearsal", None, Outcome.FAIL, explained(failed, settings) or told_whole(failed)))
        return
    except InputError:
        raise  # refused settings are not a verdict
    except Exception as error:
        text = told_whole(error)
        print(text, file=sys.stderr, flush=True)
        evidence.add(Check("rehearsal", None, Outcome.FAIL, explained(error, settings) or text))
        return
    finally:
        if term.count > stop.sent:
            # that was no rehearsal: somebody wants this canary to end
            os.kill(os.getpid(), signal.SIGTERM)
    summary = f"{steps} steps through the run's own entry point on the longest rows"
    evidence.add(Check("rehearsal", None, Outcome.PASS, summary, {"steps": result.steps}))
    _stopped(out, steps, result, evidence)
    _read_back(result, settings.workload.masters, evidence)


def _room_for(training: Training, steps: int) -> Training:
    """The training with at least that many steps to go; as it is where the run would refuse it."""
    first = 0
    if training.resume_from is not None:
        try:
            manifest = Path(training.resume_from) / "manifest.json"
            first = int(json.loads(manifest.read_text(encoding="utf-8"))["step"])
        except (OSError, ValueError, KeyError, TypeError):
            return training
    return training if training.steps <= first else replace(training, steps=max(training.steps, first + steps))


def _stopped(out: Path, steps: int, result: RunResult, evidence: Evidence) -> None:
    """SIGTERM, sent to this process while the threads were at work, must have ended the run after its step."""
    said = json.loads((out / "result.json").read_text(encoding="utf-8"))["outcome"]
    outcome = Outcome.PASS if result.outcome == said == "stopped" else Outcome.FAIL
    summary = f"SIGTERM in step {steps}: the run {said} at step {result.steps}, with a checkpoint"
    evidence.add(Check("sigterm", None, outcome, summary))


def _read_back(result: RunResult, masters: bool, evidence: Evidence) -> None:
    """The rehearsal's checkpoint: whole by the contract's own loader, finite, and bit for bit what is in memory."""
    folder, steps = result.checkpoint, result.steps
    try:
        _, weights = load_checkpoint(folder)
        resume = load_resume(folder)
    except InputError as broken:
        evidence.add(Check("checkpoint", None, Outcome.FAIL, str(broken)))
        return
    step = int(resume.state["step"])
    problem = (
        f"it says step {step} after {steps} steps"
        if step != steps
        else _problem(weights, resume.tensors, masters, steps)
        or _differs(weights, result.weights)
        or _differs(resume.tensors, result.optimizer)
    )
    outcome = Outcome.FAIL if problem else Outcome.PASS
    summary = problem or (
        f"{len(weights)} weights and the optimiser's {len(resume.tensors)} tensors of step {steps} load back bit for "
        "bit as they are in memory"
    )
    evidence.add(Check("checkpoint", None, outcome, summary, {"tensors": len(weights)}))
    if not problem:
        shutil.rmtree(folder.parent)


def _problem(weights: dict[str, Tensor], optimizer: dict[str, Tensor], masters: bool, steps: int) -> str | None:
    """What any checkpoint after `steps` steps must have, whatever is in memory."""
    for name, weight in weights.items():
        if not bool(torch.isfinite(weight).all()):
            return f"{name} is not finite"
        for key in ("exp_avg", "exp_avg_sq", "step"):
            if f"{key}.{name}" not in optimizer:
                return f"the optimiser's state of {name} is missing: {key}"
        if float(optimizer[f"step.{name}"]) != steps:
            return f"the optimiser counts {float(optimizer[f'step.{name}']):g} updates of {name} after step {steps}"
        if not bool(optimizer[f"exp_avg.{name}"].any()):
            return f"{name} never got a gradient"
        master = optimizer.get(f"master.{name}")
        if master is None and masters:
            return f"the float32 master copy of {name} is missing"
        if master is not None and not masters:
            return f"{name} has a master copy, and this workload keeps none"
        if master is not None and not torch.equal(master.to(weight.dtype), weight):
            return f"{name} is not its master copy"
    return None


def _differs(saved: dict[str, Tensor], kept: dict[str, Tensor]) -> str | None:
    """The first tensor that is not in the file as it is in memory, compared on the CPU, one at a time."""
    for name, each in kept.items():
        if name not in saved:
            return f"{name} is missing"
        if saved[name].dtype != each.dtype or not torch.equal(saved[name], each.detach().cpu()):
            return f"{name} is not in the file as it is in memory"
    return None


def save_and_load(record: GateRecord, out: Path, evidence: Evidence) -> None:
    """The first replica's weights, saved and loaded, must be the bits that were in memory."""
    replica = record.workers[0].replica
    assert replica is not None
    state = dict(replica.drafter.state_dict())
    out.mkdir()
    try:
        folder = save_checkpoint(out, record.steps_done[0], state, record.parts.drafter, {"step": record.steps_done[0]})
        config, loaded = load_checkpoint(folder)
    except InputError as broken:
        evidence.add(Check("save_and_load", None, Outcome.FAIL, str(broken)))
        return
    differ = [name for name, each in state.items() if not torch.equal(each.cpu(), loaded[name])]
    if config != record.parts.drafter:
        differ.append("config.json")
    summary = f"{differ[0]} does not load back as it was" if differ else f"{len(state)} tensors load back bit for bit"
    evidence.add(Check("save_and_load", None, Outcome.FAIL if differ else Outcome.PASS, summary))
    shutil.rmtree(out)
