"""Which device each worker uses."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trainer.errors import InputError
from trainer.settings import Workload

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Placement:
    """One device a drafter thread; for each target worker the devices that its target's layers lie on, in order."""

    drafters: tuple[torch.device, ...]
    target_groups: tuple[tuple[torch.device, ...], ...]

    @property
    def targets(self) -> tuple[torch.device, ...]:
        """Each target worker's first device, where tokens go in and hidden states come out."""
        return tuple(group[0] for group in self.target_groups)


def place(workload: Workload, cuda_devices: int) -> Placement:
    """Devices by the settings, on a machine that shows `cuda_devices` GPUs. Raises `InputError`.

    "auto" without GPUs is the CPU. With GPUs, drafters take them from the first on and target workers from the last
    on, so that they share one only where there are fewer GPUs than threads. A target over `target_gpus` GPUs takes as
    many neighbours.
    """
    if workload.require_cuda and not cuda_devices:
        raise InputError(
            "CUDA is required, and torch sees no GPU here",
            "workload.require_cuda",
            "set require_cuda: false to train on the CPU, or check CUDA_VISIBLE_DEVICES and that torch has CUDA",
        )
    count, each = cuda_devices, workload.target_gpus
    if count:
        if count < each:
            raise InputError(
                f"a target over {each} GPUs, and {count} are here", "workload.target_gpus", f"give at most {count}"
            )
        drafters = [f"cuda:{index % count}" for index in range(workload.drafter_threads)]
        groups = count // each
        firsts = [count - each * (1 + index % groups) for index in range(workload.target_workers)]
        targets = [f"cuda:{first + step}" for first in firsts for step in range(each)]
    else:
        drafters, targets = ["cpu"] * workload.drafter_threads, ["cpu"] * workload.target_workers * each
    named = _named(workload.target_devices, targets, count, "workload.target_devices")
    return Placement(
        _named(workload.drafter_devices, drafters, count, "workload.drafter_devices"),
        _grouped(named, each),
    )


def _grouped(devices: tuple[torch.device, ...], size: int) -> tuple[tuple[torch.device, ...], ...]:
    groups = tuple(devices[start : start + size] for start in range(0, len(devices), size))
    for group in groups:
        if group[0].type == "cuda" and len(set(group)) < size:
            raise InputError(
                f"{_text(group)} for one target names a GPU twice",
                "workload.target_devices",
                f"give {size} different GPUs for each target worker",
            )
        other = next((each for each in groups if each[0] == group[0] and each != group), None)
        if other is not None:
            # a target is loaded once for each first device
            raise InputError(
                f"{_text(group)} and {_text(other)} begin on the same GPU and are not the same",
                "workload.target_devices",
                "let target workers that share their first GPU share all of them",
            )
    return groups


def _text(group: tuple[torch.device, ...]) -> str:
    return ", ".join(map(str, group))


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
