"""A drafter judged on what it never trained on: held-out loss, and acceptance by real speculative decoding."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainer.anchors import block_token_ids, eligible_anchors
from trainer.block_mask import dense_block_masks
from trainer.checkpoint import load_checkpoint
from trainer.data import collate_held_out
from trainer.dflash_model import DFlashDrafter
from trainer.errors import InputError
from trainer.evaluate import Evaluation, evaluate
from trainer.facts import refuse_other_drafter
from trainer.files import write_json
from trainer.loss import block_loss
from trainer.parts import Parts, available_cpus, frozen_head, load_parts
from trainer.sampler import derive_seed
from trainer.settings import CONTRACT, ONLINE, Settings
from trainer.target import Target

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Judgement:
    """`loss`: weighted mean over all held-out labels, in nats; None where no held-out answer fits a bucket."""

    loss: float | None
    decoding: Evaluation

    def summary(self) -> dict[str, float | None]:
        """For `result.json`."""
        return {
            "loss": self.loss,
            "first_slot_acceptance": self.decoding.first_slot_acceptance,
            "tau": self.decoding.tau,
        }

    def record(self) -> dict[str, Any]:
        """For the `evaluation` record of the metrics, and for `evaluation.json`."""
        return {
            **self.summary(),
            "accepted_by_position": list(self.decoding.accepted_by_position),
            "lossless": self.decoding.lossless,
            "mismatches": [vars(each) for each in self.decoding.mismatches],
        }


def judge(parts: Parts, weights: dict[str, Tensor]) -> Judgement | None:
    """Judge a drafter with these weights next to its target; None where nothing is held out."""
    if not parts.held_out:
        return None
    target = parts.judging_target()
    drafter = DFlashDrafter(parts.drafter, device="meta", dtype=parts.dtype)
    drafter.load_state_dict({name: each.to(target.device) for name, each in weights.items()}, assign=True)
    drafter.eval().requires_grad_(False)
    loss = held_out_loss(parts, drafter, target)
    prompts = [list(each.prompt) for each in parts.held_out]
    decoding = evaluate(target, drafter, prompts, parts.settings.training.evaluation_tokens)
    return Judgement(loss, decoding)


@torch.no_grad()
def held_out_loss(parts: Parts, drafter: DFlashDrafter, target: Target) -> float | None:
    """Loss over the held-out answers, with the same anchors at every call; None where no answer fits a bucket."""
    frozen = frozen_head(target, target.device, parts.dtype)
    longest, pad = parts.settings.workload.buckets[-1], 0
    total = weight = 0.0
    for index, item in enumerate(parts.held_out):
        rows = collate_held_out([item], longest, pad)
        if not bool(eligible_anchors(rows.loss_mask, rows.lengths, parts.maker.rule).any()):
            log.warning(
                "held-out prompt %d leaves no room for its answer in %d tokens: not in the loss", index, longest
            )
            continue
        seed = derive_seed(parts.settings.training.seed, "held out", index)
        batch = parts.maker.from_rows(rows, seed, target, target.device)
        size = parts.drafter.block_size
        ids = block_token_ids(batch.input_ids, batch.anchors, size, parts.drafter.mask_token_id)
        masks = dense_block_masks(parts.drafter, batch.anchors, batch.lengths, longest)
        hidden = drafter(
            nn.functional.embedding(ids, frozen.embed_weight), batch.features, batch.anchors.positions, *masks
        )
        loss_type = parts.settings.workload.loss_type
        found = block_loss(hidden, frozen.head_weight, batch.labels, batch.weights, loss_type=loss_type)
        total += float(found.loss_sum)
        weight += float(found.weight_sum)
    return total / weight if weight else None


def judge_checkpoint(settings: Settings, checkpoint: Path, out: Path) -> None:
    """The `evaluate` verb: write `evaluation.json`. Raises `InputError`."""
    torch.set_num_threads(available_cpus())
    # nothing is compiled here, so `auto` needs no table, and nothing trained, which would need hidden states
    work = replace(settings.workload, strategy="eager", hidden_states=ONLINE)
    training = replace(settings.training, resume_from=None, init_from=None)
    parts = load_parts(replace(settings, workload=work, training=training))
    config, weights = load_checkpoint(checkpoint, resumable=False)
    refuse_other_drafter(config, parts.drafter, "--checkpoint")
    found = judge(parts, {name: each.to(parts.dtype) for name, each in weights.items()})
    if found is None:
        raise InputError(
            "no prompts are held out", "training.evaluation_prompts", "give at least 1, and prepare the data again"
        )
    write_json(
        out / "evaluation.json",
        {
            "contract": CONTRACT,
            "checkpoint": str(checkpoint),
            **found.record(),
            "cycles": found.decoding.cycles,
            "tokens": found.decoding.tokens,
        },
    )
