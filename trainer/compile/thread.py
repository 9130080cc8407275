"""What a worker thread sets up for itself, first of all."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def own_device(device: torch.device, *others: torch.device) -> Iterator[None]:
    """Make `device` the thread's current one, with a stream of its own, and keep the backward in this thread.

    `others`: GPUs on which the thread works as well; there it has a stream of its own too.
    """
    with contextlib.ExitStack() as stack:
        for other in others:
            if other.type == "cuda":
                stack.enter_context(torch.cuda.stream(torch.cuda.Stream(other)))
        if device.type == "cuda":
            torch.cuda.set_device(device)
            stack.enter_context(torch.cuda.stream(torch.cuda.Stream(device)))
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        yield
