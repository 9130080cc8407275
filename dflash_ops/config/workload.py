"""The settings that the canary's verdict depends on. Keys, types and defaults: docs/trainer-contract.md."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from dflash_ops.config.base import TEXT, Matches, Model
from dflash_ops.limits import LONGEST_S, MOST

Count = Annotated[int, Field(ge=1, le=MOST)]
Dtype = Literal["float32", "bfloat16"]
Device = Annotated[str, Matches(r"cpu|cuda:[0-9]+", "'cpu' or 'cuda:N'")]
GpuUuid = Annotated[str, Matches(r"(GPU|MIG)-[0-9A-Za-z/-]+", "a UUID as `nvidia-smi -L` prints it")]
Index = Annotated[int, Field(ge=0, le=MOST)]
# strict refuses a list where a tuple is meant; the items stay strict
Devices = Annotated[tuple[Device, ...], Field(strict=False, min_length=1)]
Gpus = Annotated[tuple[Index | GpuUuid, ...], Field(strict=False, min_length=1)]
Layers = Annotated[tuple[Index, ...], Field(strict=False, min_length=1)]
LayerTypes = Annotated[tuple[Literal["full_attention", "sliding_attention"], ...], Field(strict=False, min_length=1)]
Buckets = Annotated[tuple[Annotated[int, Field(ge=2, le=MOST)], ...], Field(strict=False, min_length=1)]


class Workload(Model):
    """Threads, shapes, dtype, strategy, placement and model sizes."""

    target: Annotated[str, TEXT]
    """Target model on the host: a transformers folder, a .gguf file, or package:NAME/FILE."""
    require_cuda: bool = True
    """Refuse to run without CUDA."""
    gpus: Literal["all"] | Gpus = "all"
    """GPUs that the run may use: all, or a list of index or UUID."""
    drafter_threads: Count = 1
    """Drafter replicas, one thread each."""
    target_workers: Count = 1
    """Threads that produce hidden states."""
    target_gpus: Count = 1
    """GPUs that one target's layers are spread over, where it is too large for one; needs target_forward: eager."""
    drafter_devices: Literal["auto"] | Devices = "auto"
    """auto, or one of cpu, cuda:N for each drafter."""
    target_devices: Literal["auto"] | Devices = "auto"
    """auto, or one of cpu, cuda:N for each target worker; target_gpus of them for each, in the order of the layers."""
    dtype: Dtype = "bfloat16"
    """The drafter's parameters and activations."""
    target_dtype: Dtype = "bfloat16"
    """The target's."""
    linear_precision: Literal["dtype", "fp8"] = "dtype"
    """fp8: the blocks' linear layers and the head multiply 8-bit floats; dtype: numbers of the drafter's dtype."""
    master_weights: Literal["float32", "none"] = "float32"
    """float32: bfloat16 parameters are updated in float32 copies; none: in place, with moments in their own dtype."""
    hidden_states: Literal["online", "offline"] = "online"
    """The target's: computed beside training, or written to the host's disk once, by `prepare`, and read from there."""
    target_forward: Literal["graph", "eager"] = "graph"
    """graph: on a GPU the target's forward is replayed from CUDA graphs; eager: launched kernel by kernel."""
    strategy: Literal["eager", "default", "reduce-overhead", "reduce-overhead-trees", "whole-step", "auto"] = (
        "reduce-overhead"
    )
    """How the drafter step is compiled; auto: the fastest right one that `tune` measured on these GPUs."""
    block_size: Annotated[int, Field(ge=2, le=MOST)] = 16
    """Anchor + masks, in tokens."""
    anchors: Count = 512
    """Anchor slots a sequence; unused ones are masked, so shapes stay static."""
    buckets: Buckets = (3072,)
    """Padded sequence lengths in tokens, ascending."""
    batch_size: Count = 1
    """Sequences a drafter takes for one forward-backward."""
    accumulation: Count = 1
    """Forward-backwards an optimiser step."""
    draft_layers: Count = 5
    """Decoder layers of the drafter."""
    target_layers: Literal["auto"] | Layers = "auto"
    """auto (evenly spaced), or the target layers whose output feeds the drafter."""
    draft_ffn: Count | None = None
    """The drafter's FFN width; null: the target's."""
    layer_types: Literal["auto"] | LayerTypes = "auto"
    """One full_attention or sliding_attention for each draft layer; auto: with a window all slide but the last."""
    sliding_window: Annotated[int, Field(ge=2, le=MOST)] | None = None
    """Positions that a sliding layer sees, a block at least; null: no sliding layers."""
    sliding_window_origin: Literal["query", "anchor"] = "query"
    """Where a window ends: at each query (as engines serve it), or at the block's anchor (as speculators trains)."""
    sliding_window_non_causal: bool = False
    """Sliding layers see the whole of their block; false: no later slot, which is the engines' default."""
    loss_type: Literal["dflash", "dpace"] = "dflash"
    """Slot weights of the loss: the DFlash paper's decay, or D-PACE, from the drafter's own confidence."""
    mask_token: Annotated[str, Field(min_length=1)] | Index
    """A reserved token of the target's vocabulary (text or id), or auto; never pad, eos, bos or one of the data."""
    canary_steps: Count = 3
    """Optimiser steps that the gate compares."""
    rehearsal_steps: Count = 3
    """Steps of the run's own entry point in the canary."""
    canary_timeout_s: Annotated[int, Field(ge=1, le=LONGEST_S)] = 600
    """The watchdog of the canary, and of each strategy that is tuned, in seconds."""
    throughput_check: bool = True
    """Compare the canary's step time with this GPU's history; false where canaries run side by side."""

    @field_validator("drafter_devices", "target_devices")
    @classmethod
    def _one_for_each(cls, devices: tuple[str, ...] | str, info: ValidationInfo) -> tuple[str, ...] | str:
        threads = "drafter_threads" if info.field_name == "drafter_devices" else "target_workers"
        count, each = info.data.get(threads), info.data.get("target_gpus", 1) if threads == "target_workers" else 1
        if devices != "auto" and count is not None and len(devices) != count * each:
            entries = "one entry for each" if each == 1 else f"{each} entries for each (target_gpus)"
            raise ValueError(f"names {len(devices)} devices, {threads} is {count}; {entries}")
        return devices

    @model_validator(mode="after")
    def _no_graph_over_several(self) -> Workload:
        if self.target_gpus > 1 and self.target_forward != "eager":
            raise ValueError(
                f"target_gpus is {self.target_gpus}: a forward over several GPUs is in no CUDA graph; "
                "set target_forward: eager"
            )
        return self

    @field_validator("layer_types")
    @classmethod
    def _one_type_a_layer(cls, kinds: tuple[str, ...] | str, info: ValidationInfo) -> tuple[str, ...] | str:
        count = info.data.get("draft_layers", len(kinds))
        if kinds != "auto" and len(kinds) != count:
            raise ValueError(f"names {len(kinds)} layer types, draft_layers is {count}; one entry for each")
        return kinds

    @model_validator(mode="after")
    def _window_and_layers(self) -> Workload:
        window, kinds = self.sliding_window, self.layer_types
        if window is None and "sliding_attention" in kinds:
            raise ValueError("layer_types has sliding layers; give their sliding_window too")
        if window is not None and ("sliding_attention" not in kinds if kinds != "auto" else self.draft_layers == 1):
            raise ValueError(
                f"sliding_window is {window} and no layer slides; name some in layer_types (auto keeps the last full)"
            )
        if window is not None and window < self.block_size:
            raise ValueError(f"sliding_window is {window}, less than block_size {self.block_size}")
        return self

    @field_validator("buckets", "target_layers")
    @classmethod
    def _ascending(cls, numbers: tuple[int, ...] | Literal["auto"]) -> tuple[int, ...] | Literal["auto"]:
        if not isinstance(numbers, str) and list(numbers) != sorted(set(numbers)):
            raise ValueError("must be ascending, each number once")
        return numbers
