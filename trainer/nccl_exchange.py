"""The exchange between GPUs of one process: a sum on each GPU, one NCCL all-reduce over the GPUs, a copy on each GPU.

One thread queues the all-reduce on the streams of all GPUs at once, which is NCCL's way for several GPUs in a thread:
nothing waits for a device, and each worker's next kernels follow on its own stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.cuda import nccl

from trainer.abort import Abort
from trainer.exchange import Exchange, ThreadExchange, merged


def exchange_between(
    devices: Sequence[torch.device], abort: Abort, between: Callable[[int], None] | None = None
) -> Exchange:
    """The exchange for one replica on each of `devices` (several may name the same one), in worker order.

    `between` is called in each worker's thread when all gradients are there and before any is summed.
    """
    distinct = dict.fromkeys(devices)
    if len(distinct) > 1 and all(each.type == "cuda" for each in distinct):
        return NcclExchange(devices, abort, between)
    return ThreadExchange(len(devices), abort, between)


class NcclExchange(ThreadExchange):
    """Replicas on several GPUs. The first worker on each GPU leads it.

    Every replica gets the same bits: NCCL gives one result to all GPUs of an all-reduce.
    """

    def __init__(
        self, devices: Sequence[torch.device], abort: Abort, between: Callable[[int], None] | None = None
    ) -> None:
        super().__init__(len(devices), abort, between)
        groups: dict[torch.device, list[int]] = {}
        for worker, device in enumerate(devices):
            groups.setdefault(device, []).append(worker)
        self._mates = [groups[device][1:] for device in devices]
        self._leaders = [group[0] for group in groups.values()]
        self._shared = len(self._leaders) < len(devices)
        self._streams: list[torch.cuda.Stream] = [torch.cuda.current_stream(device) for device in devices]
        self._here: list[torch.cuda.Event] = [torch.cuda.Event() for _ in devices]
        self._groups = groups

    def open(self) -> None:
        """Make NCCL's communicator, which allocates on every GPU. Call it while no worker captures."""
        ones = [torch.ones(1, device=device) for device in self._groups]
        nccl.all_reduce(ones)
        for device, found in zip(self._groups, ones, strict=True):
            torch.cuda.synchronize(device)
            if found.item() != len(ones):
                raise RuntimeError(f"NCCL summed {len(ones)} ones to {found.item()} on {device}")

    def gradients(self, worker: int, gradients: Sequence[Tensor]) -> None:
        """See `Exchange`."""
        stream = torch.cuda.current_stream(gradients[0].device)
        self._gradients[worker], self._streams[worker] = gradients, stream
        if self._shared:
            self._here[worker].record(stream)
        self._meet()
        self._all_are_there(worker)
        leads = worker in self._leaders
        if self._shared:
            if leads:
                for mate in self._mates[worker]:
                    stream.wait_event(self._here[mate])
                    torch._foreach_add_(list(gradients), list(self._gradients[mate]))
            self._meet()
        if worker == self._leaders[0]:
            streams = [self._streams[leader] for leader in self._leaders]
            for same in zip(*(merged(self._gradients[leader]) for leader in self._leaders), strict=True):
                nccl.all_reduce(list(same), streams=streams)
        self._meet()
        if self._shared:
            if leads:
                for mate in self._mates[worker]:
                    torch._foreach_copy_(list(self._gradients[mate]), list(gradients))
                self._here[worker].record(stream)
            self._meet()
            if not leads:
                stream.wait_event(self._here[self._groups[gradients[0].device][0]])
