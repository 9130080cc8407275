"""One drafter thread's replica: model, compiled step and optimiser."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trainer.dflash_model import DFlashDrafter
from trainer.optimizer import ClippedAdamW
from trainer.parts import Parts
from trainer.step import DrafterStep, TrainingStep


@dataclass(frozen=True)
class DrafterReplica:
    """What `workers.DrafterWorker` trains."""

    drafter: DFlashDrafter
    step: TrainingStep
    optimizer: ClippedAdamW


def build_replica(parts: Parts, worker: int) -> DrafterReplica:
    """Build, compile and warm up the replica of drafter `worker`; call it in that worker's thread, inside the gate."""
    work, training = parts.settings.workload, parts.settings.training
    device = parts.placement.drafters[worker]
    drafter = bare_drafter(parts, device)
    optimizer = ClippedAdamW(
        list(drafter.named_parameters()),
        betas=training.betas,
        weight_decay=training.weight_decay,
        clip=training.clip,
        masters=work.masters,
    )
    if parts.start.optimizer is not None:
        optimizer.load_state_tensors(parts.start.optimizer)
    step = DrafterStep(
        drafter,
        parts.frozen[device],
        optimizer,
        parts.strategy,
        buckets=work.buckets,
        rows=work.batch_size,
        slots=work.anchors,
        accumulation=work.accumulation,
        replicas=work.drafter_threads,
        name=f"drafter_{worker}",
        loss_type=work.loss_type,
    )
    return DrafterReplica(drafter, step, optimizer)


def bare_drafter(parts: Parts, device: torch.device) -> DFlashDrafter:
    """A drafter with the run's first weights (or the checkpoint's) on `device`."""
    drafter = DFlashDrafter(parts.drafter, device="meta", dtype=parts.dtype, narrow=parts.settings.workload.fp8)
    weights = {name: each.to(device, copy=True) for name, each in parts.start.weights.items()}
    drafter.load_state_dict(weights, assign=True)
    return drafter.requires_grad_(True)
