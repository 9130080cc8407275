"""From the CPU to a GPU without waiting for it."""

from __future__ import annotations

import torch
from torch import Tensor


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """A CPU tensor on `device`, in the order of the thread's stream there; this thread does not wait for a GPU."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
