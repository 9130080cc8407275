"""What workers compute on, by name."""

from __future__ import annotations

from pathlib import Path

import torch


def uuid_of(device: torch.device) -> str:
    """A CUDA device's UUID, as nvidia-smi spells it."""
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def device_name(device: torch.device) -> str:
    """A GPU's product name; the CPU's model as Linux knows it."""
    return torch.cuda.get_device_properties(device).name if device.type == "cuda" else cpu_model()


def cpu_model() -> str:
    """Empty where the kernel does not say."""
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return ""
