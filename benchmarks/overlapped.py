"""What the best overlap of the exchange could bring: its traffic beside the steps, and none of its result."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.cuda import nccl

from trainer.abort import Abort
from trainer.exchange import merged
from trainer.nccl_exchange import NcclExchange


class AsIfOverlapped(NcclExchange):
    """An all-reduce of as many bytes, begun after the backward on a stream of its own, that no update waits for.

    One replica on each of `devices`, all of them GPUs. It sums buffers of its own, so that nothing is written while it
    is read: each replica goes on with its own gradients, and they train apart.
    """

    def __init__(self, devices: Sequence[torch.device], abort: Abort) -> None:
        if len(set(devices)) < len(devices):
            raise ValueError(f"one replica a GPU is needed, these are {devices}")
        super().__init__(devices, abort)
        self._beside = [torch.cuda.Stream(device) for device in devices]
        self._buffers: list[list[Tensor]] = [[] for _ in devices]

    def gradients(self, worker: int, gradients: Sequence[Tensor]) -> None:
        """Leaves `gradients` as they are."""
        if not self._buffers[worker]:
            self._buffers[worker] = [torch.zeros_like(each) for each in merged(gradients)]
        self._beside[worker].wait_stream(torch.cuda.current_stream(gradients[0].device))
        self._meet()
        if worker == 0:
            for same in zip(*self._buffers, strict=True):
                nccl.all_reduce(list(same), streams=self._beside)
        self._meet()
