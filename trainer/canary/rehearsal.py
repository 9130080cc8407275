"""The rehearsal: a few steps of the run's own entry point, and its checkpoint read back."""

from __future__ import annotations

import shutil
import traceback
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from trainer.canary.evidence import Check, Evidence, Outcome
from trainer.canary.gate import GateRecord
from trainer.checkpoint import load_checkpoint, load_resume, save_checkpoint
from trainer.errors import InputError, WorkerFailed
from trainer.settings import Settings
from trainer.train_dflash_pipeline import run

_EVALUATION_TOKENS = 8


def rehearse(settings: Settings, out: Path, evidence: Evidence) -> None:
    """Real target, real rows (the longest), queues, exchange, evaluation and checkpoint, in `out`.

    The checkpoints are removed when they passed: they are as large as the run's.
    """
    steps = settings.workload.rehearsal_steps
    # decoding is rehearsed too, but not at full length
    training = replace(
        settings.training, evaluation_tokens=min(_EVALUATION_TOKENS, settings.training.evaluation_tokens)
    )
    out.mkdir()
    try:
        result = run(replace(settings, training=training), out, limit_steps=steps, longest_first=True)
    except WorkerFailed as failed:
        evidence.add(Check("rehearsal", None, Outcome.FAIL, failed.trace.strip()))
        return
    except InputError:
        raise  # refused settings are not a verdict
    except Exception:
        text = traceback.format_exc()
        evidence.add(Check("rehearsal", None, Outcome.FAIL, text.strip()))
        return
    summary = f"{steps} steps through the run's own entry point, {result.outcome}"
    outcome = Outcome.PASS if result.outcome == "completed" else Outcome.FAIL
    evidence.add(Check("rehearsal", None, outcome, summary, {"steps": result.steps}))
    _read_back(result.checkpoint, result.steps, evidence)


def _read_back(folder: Path, steps: int, evidence: Evidence) -> None:
    """The rehearsal's checkpoint: whole by the contract's own loader, finite, and with the state to go on from."""
    try:
        _, weights = load_checkpoint(folder)
        resume = load_resume(folder)
    except InputError as broken:
        evidence.add(Check("checkpoint", None, Outcome.FAIL, str(broken)))
        return
    problem = _problem(weights, resume.tensors, int(resume.state["step"]), steps)
    outcome = Outcome.FAIL if problem else Outcome.PASS
    summary = problem or f"{len(weights)} tensors and the optimiser's state of step {steps} load back"
    evidence.add(Check("checkpoint", None, outcome, summary, {"tensors": len(weights)}))
    if not problem:
        shutil.rmtree(folder.parent)


def _problem(weights: dict[str, Tensor], optimizer: dict[str, Tensor], step: int, steps: int) -> str | None:
    if step != steps:
        return f"it says step {step} after {steps} steps"
    for name, weight in weights.items():
        if not bool(torch.isfinite(weight).all()):
            return f"{name} is not finite"
        if f"exp_avg.{name}" not in optimizer:
            return f"the optimiser's state of {name} is missing"
        if not bool(optimizer[f"exp_avg.{name}"].any()):
            return f"{name} never got a gradient"
        master = optimizer.get(f"master.{name}")
        if master is None and weight.element_size() < 4:
            return f"the float32 master copy of {name} is missing"
        if master is not None and not torch.equal(master.to(weight.dtype), weight):
            return f"{name} is not its master copy"
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
