"""Random batches at the run's shapes: other data for every worker and step, from generators of their own."""

from __future__ import annotations

import torch

from trainer.anchors import Anchors, sample_anchors
from trainer.loss import block_labels, slot_decay
from trainer.parts import Parts
from trainer.sampler import derive_seed
from trainer.step import Batch


def random_batches(parts: Parts, worker: int, count: int) -> list[Batch]:
    """`count` micro-batches for one drafter, on its device; the largest bucket comes first, then all in turn."""
    buckets = parts.settings.workload.buckets
    return [_batch(parts, worker, number, buckets[-1 - number % len(buckets)]) for number in range(count)]


def _batch(parts: Parts, worker: int, number: int, bucket: int) -> Batch:
    work, config = parts.settings.workload, parts.drafter
    device, rows = parts.placement.drafters[worker], work.batch_size
    generator = torch.Generator().manual_seed(derive_seed("canary", worker, number))
    input_ids = torch.randint(0, config.vocab_size, (rows, bucket), generator=generator)
    lengths = torch.randint(max(2, bucket // 2), bucket + 1, (rows,), generator=generator)
    lengths[0] = bucket
    position = torch.arange(bucket)
    # the first quarter is a prompt
    loss_mask = (position >= bucket // 4) & (position < lengths[:, None])
    anchors = sample_anchors(loss_mask, lengths, work.anchors, generator)
    gamma = slot_decay(work.loss_type, config.block_size, None)
    labels, weights = block_labels(input_ids, loss_mask, lengths, anchors, config.block_size, gamma)
    width = len(config.target_layer_ids) * config.hidden_size
    features = torch.randn((rows, bucket, width), generator=generator)
    return Batch(
        row_ids=(number,),
        input_ids=input_ids.to(device),
        lengths=lengths.to(device),
        features=features.to(device, parts.dtype),
        anchors=Anchors(anchors.positions.to(device), anchors.keep.to(device)),
        labels=labels.to(device),
        weights=weights.to(device),
        weight_sum=float(weights.double().sum()),
    )
