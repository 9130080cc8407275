"""Which device each worker uses."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trainer.errors import InputError
from trainer.settings import Workload

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Placement:
    """One device a drafter thread, one a target worker."""

    drafters: tuple[torch.device, ...]
    targets: tuple[torch.device, ...]


def place(workload: Workload, cuda_devices: int) -> Placement:
    """Devices by the settings, on a machine that shows `cuda_devices` GPUs. Raises `InputError`.

    "auto" without GPUs is the CPU. With GPUs, drafters take them from the first on and target workers from the last
    on, so that they share one only where there are fewer GPUs than threads.
    """
    if workload.require_cuda and not cuda_devices:
        raise InputError(
            "CUDA is required, and torch sees no GPU here",
            "workload.require_cuda",
            "set require_cuda: false to train on the CPU, or check CUDA_VISIBLE_DEVICES and that torch has CUDA",
        )
    count = cuda_devices
    if count:
        drafters = [f"cuda:{index % count}" for index in range(workload.drafter_threads)]
        targets = [f"cuda:{(count - 1 - index) % count}" for index in range(workload.target_workers)]
    else:
        drafters, targets = ["cpu"] * workload.drafter_threads, ["cpu"] * workload.target_workers
    return Placement(
        _named(workload.drafter_devices, drafters, count, "workload.drafter_devices"),
        _named(workload.target_devices, targets, count, "workload.target_devices"),
    )


def _named(wanted: str | tuple[str, ...], auto: list[str], count: int, where: str) -> tuple[torch.device, ...]:
    names = auto if isinstance(wanted, str) else list(wanted)
    for name in names:
        device = torch.device(name)
        if device.type == "cuda" and (device.index or 0) >= count:
            raise InputError(
                f"{name} is not there",
                where,
                f"the GPUs are cuda:0 to cuda:{count - 1}" if count else "there is no GPU: give cpu",
            )
    return tuple(torch.device(name) for name in names)
