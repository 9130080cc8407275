"""Where `workload.linear_precision: fp8` can work."""

from __future__ import annotations

import torch

from trainer.drafter_config import DrafterConfig
from trainer.errors import InputError
from trainer.fp8 import MULTIPLE
from trainer.placement import Placement
from trainer.settings import Workload

_KEY = "workload.linear_precision"
_OTHERWISE = "set linear_precision: dtype"
_CAPABILITY = (8, 9)


def refuse_impossible_fp8(work: Workload, placement: Placement, config: DrafterConfig) -> None:
    """Raises `InputError` where the drafters' GPUs, their dtype or a width cannot do what the workload asks."""
    if not work.fp8:
        return
    widths = {
        "hidden size": config.hidden_size,
        "feed-forward size": config.intermediate_size,
        "width of the query heads": config.num_attention_heads * config.head_dim,
        "width of the key heads": config.num_key_value_heads * config.head_dim,
        "vocabulary": config.vocab_size,
    }
    for what, width in widths.items():
        if width % MULTIPLE:
            raise InputError(
                f"fp8 multiplies widths that are multiples of {MULTIPLE}, and the drafter's {what} is {width}",
                _KEY,
                _OTHERWISE,
            )
    for device in placement.drafters:
        if device.type != "cuda":
            continue
        if work.dtype != "bfloat16":
            raise InputError(f"fp8 on a GPU gives bfloat16, and dtype is {work.dtype}", _KEY, "set dtype: bfloat16")
        found = torch.cuda.get_device_capability(device)
        if found < _CAPABILITY:
            raise InputError(
                f"fp8 needs a GPU of compute capability {_text(_CAPABILITY)}, and {device} has {_text(found)}",
                _KEY,
                _OTHERWISE,
            )


def _text(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
