"""What a run is made of: targets, data, shapes and the drafter's first weights, loaded before any thread starts."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.anchors import anchor_rule
from trainer.assets import resolve_asset
from trainer.checkpoint import load_checkpoint, load_resume
from trainer.compile import Strategy
from trainer.data import HeldOut, TrainingData
from trainer.dflash_model import DFlashDrafter, DrafterConfig
from trainer.errors import InputError
from trainer.facts import TargetFacts, cautions, open_data, refuse_other_drafter, target_facts
from trainer.fp8 import NarrowHead
from trainer.fp8_rules import refuse_impossible_fp8
from trainer.hidden_states import HiddenStates, origin_of
from trainer.loss import slot_decay
from trainer.mask_token import refuse_mask_in_data
from trainer.optimizer import refuse_other_masters
from trainer.placement import DTYPES, Placement, place
from trainer.prepared import is_prepared, read_held_out
from trainer.sampler import FixedOrder, RowOrder, Sampler, Schedule, derive_seed
from trainer.settings import OFFLINE, Settings, Workload
from trainer.step import FrozenHead
from trainer.strategy import strategy_of
from trainer.target import Target
from trainer.target_files import target_folder
from trainer.target_weights import SharedWeights, shared_weights
from trainer.workers import BatchMaker, FeatureSource

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Start:
    """Where training begins: weights (on the CPU), optimiser state (None: fresh), steps done, rows dealt out."""

    step: int
    weights: dict[str, Tensor]
    optimizer: dict[str, Tensor] | None
    position: int


@dataclass(frozen=True)
class Parts:
    """Everything that the threads of one run share; nothing of it is written while they run.

    `targets`, by their first devices, is empty where `states`, which are on disk, take their place, unless a drafter is
    judged while it trains.
    """

    settings: Settings
    placement: Placement
    targets: dict[torch.device, Target]
    states: HiddenStates | None
    frozen: dict[torch.device, FrozenHead]
    drafter: DrafterConfig
    dtype: torch.dtype
    strategy: Strategy
    schedule: Schedule
    data: TrainingData
    order: RowOrder
    held_out: list[HeldOut]
    maker: BatchMaker
    start: Start

    @property
    def cpu_threads(self) -> int:
        """Torch's intra-op threads for each worker: the CPUs shared out, so that workers do not fight for them."""
        workers = len(self.placement.drafters) + len(self.placement.targets)
        return max(1, available_cpus() // workers)

    def recorded_shapes(self, device: torch.device) -> list[tuple[int, int]]:
        """The batch shapes [rows, tokens] whose target forward on `device` is to be in CUDA graphs."""
        work = self.settings.workload
        if device.type != "cuda" or work.target_forward == "eager" or self.states is not None:
            return []
        return [(work.batch_size, tokens) for tokens in work.buckets]

    def features_on(self, device: torch.device) -> FeatureSource:
        """Where the target workers of a device get hidden states."""
        return self.targets[device] if self.states is None else self.states

    def judging_target(self) -> Target:
        """The target that a drafter is judged with; loaded for the caller alone where training needs none."""
        devices = self.placement.target_groups[0]
        if devices[0] in self.targets:
            return self.targets[devices[0]]
        return load_target(self.settings, devices, self.drafter.target_layer_ids)


def available_cpus() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0))


def load_targets(settings: Settings, placement: Placement, layer_ids: Sequence[int]) -> dict[torch.device, Target]:
    """The target, once on each device, or group of them, that has a target worker. Raises `InputError`."""
    groups = dict.fromkeys(placement.target_groups)
    return {devices[0]: load_target(settings, devices, layer_ids) for devices in groups}


def load_target(settings: Settings, devices: Sequence[torch.device], layer_ids: Sequence[int]) -> Target:
    """The target on one device, or over several. Raises `InputError`."""
    work = settings.workload
    path = resolve_asset(work.target, "workload.target")
    return Target.load(path, devices, DTYPES[work.target_dtype], layer_ids, settings.cache)


def frozen_head(target: Target | SharedWeights, device: torch.device, dtype: torch.dtype) -> FrozenHead:
    """The target's embedding and head on a drafter's device; no copy where device and dtype are the target's."""
    embed = target.embed_weight.to(device, dtype)
    tied = target.head_weight is target.embed_weight
    return FrozenHead(embed, embed if tied else target.head_weight.to(device, dtype))


def initial_weights(config: DrafterConfig, dtype: torch.dtype, seed: int) -> dict[str, Tensor]:
    """The drafter's first weights on the CPU: the same for every replica, from `seed` alone."""
    generator = torch.Generator().manual_seed(derive_seed(seed, "weights"))
    return dict(DFlashDrafter(config, device="cpu", dtype=dtype, generator=generator).state_dict())


def load_parts(settings: Settings, *, longest_first: bool = False, judged: bool = False) -> Parts:
    """Load everything. `longest_first`: the longest rows, longest first, and of what is held out the longest alone.

    `judged`: the drafter may be judged while it trains. Raises `InputError`.
    """
    work, training = settings.workload, settings.training
    placement = place(work, torch.cuda.device_count())
    # a GGUF file is converted before anything else reads it: its small files load much faster from there
    folder = target_folder(resolve_asset(work.target, "workload.target"), settings.cache)
    facts = target_facts(settings)
    config = facts.drafter
    refuse_impossible_fp8(work, placement, config)
    for each in cautions(config):
        log.warning("%s", each)
    data = open_data(settings, facts.tokenizer, facts.config.vocab_size)
    refuse_mask_in_data(config.mask_token_id, facts.tokenizer, config.vocab_size, data)
    held_out = data.held_out()
    if settings.prepared is not None and is_prepared(settings):
        held_out = read_held_out(settings.prepared)
    states = _states(settings, facts, data)
    targets: dict[torch.device, Target] = {}
    shared: SharedWeights | None = None
    if states is None:
        targets = load_targets(settings, placement, config.target_layer_ids)
    else:
        if judged and training.evaluate_every is not None and held_out:
            first = placement.target_groups[0]
            targets = {first[0]: load_target(settings, first, config.target_layer_ids)}
        shared = shared_weights(folder, facts.config, DTYPES[work.target_dtype])
    dtype = DTYPES[work.dtype]
    schedule = Schedule(work.drafter_threads, work.accumulation, work.batch_size)
    start = _start(settings, config, dtype, data, schedule)
    order: RowOrder
    if longest_first:
        order = FixedOrder(data.longest_rows(schedule.samples_per_step), schedule)
        held_out = sorted(held_out, key=lambda each: -len(each.prompt) - len(each.answer))[:1]
    else:
        order = Sampler(data.rows, training.seed, schedule, start=start.position, first_step=start.step)
    return Parts(
        settings=settings,
        placement=placement,
        targets=targets,
        states=states,
        frozen={
            device: _for_training(frozen_head(shared or _near(targets, device), device, dtype), work)
            for device in dict.fromkeys(placement.drafters)
        },
        drafter=config,
        dtype=dtype,
        strategy=strategy_of(work, placement),
        schedule=schedule,
        data=data,
        order=order,
        held_out=held_out,
        maker=BatchMaker(
            data=data,
            order=order,
            anchors=work.anchors,
            rule=anchor_rule(training.anchor_eligibility, work.block_size),
            block_size=work.block_size,
            gamma=slot_decay(work.loss_type, work.block_size, training.decay_gamma),
            seed=training.seed,
            dtype=dtype,
        ),
        start=start,
    )


def _states(settings: Settings, facts: TargetFacts, data: TrainingData) -> HiddenStates | None:
    if settings.workload.hidden_states != OFFLINE:
        return None
    if settings.prepared is None:
        raise InputError("there are no prepared hidden states", "settings.prepared", "run prepare first")
    return HiddenStates.open(settings.prepared, origin_of(settings, facts.drafter, data))


def _for_training(frozen: FrozenHead, work: Workload) -> FrozenHead:
    return replace(frozen, narrow=NarrowHead.of(frozen.head_weight)) if work.fp8 else frozen


def _near(targets: dict[torch.device, Target], device: torch.device) -> Target:
    return targets.get(device, next(iter(targets.values())))


def _start(
    settings: Settings, config: DrafterConfig, dtype: torch.dtype, data: TrainingData, schedule: Schedule
) -> Start:
    training = settings.training
    if training.init_from is not None:
        found, weights = load_checkpoint(Path(training.init_from), resumable=False)
        refuse_other_drafter(found, config, "training.init_from")
        log.info("weights of %s; step 0, a fresh optimiser", training.init_from)
        return Start(0, {name: each.to(dtype) for name, each in weights.items()}, None, 0)
    if training.resume_from is None:
        return Start(0, initial_weights(config, dtype, training.seed), None, 0)
    path = Path(training.resume_from)
    found, weights = load_checkpoint(path)
    refuse_other_drafter(found, config, "training.resume_from")
    resume = load_resume(path)
    refuse_other_masters(resume.tensors, settings.workload.masters)
    step = int(resume.state["step"])
    if step >= training.steps:
        raise InputError(
            f"the checkpoint is at step {step}, and training.steps is {training.steps}: nothing is left to do",
            "training.resume_from",
            f"give more than {step} steps",
        )
    position = int(resume.state["position"])
    wanted = order_facts(training.seed, data)
    if resume.state["order"] != wanted:
        log.warning("seed or rows are not the checkpoint's: the order of rows begins anew, resuming is not exact")
        position = 0
    # a run stopped before its first step had no optimiser yet
    state = resume.tensors if step > 0 else None
    return Start(step, {name: each.to(dtype) for name, each in weights.items()}, state, position)


def order_facts(seed: int, data: TrainingData) -> dict[str, Any]:
    """What the order of rows depends on besides the position; kept in a checkpoint."""
    return {"seed": seed, "rows": len(data.rows)}
