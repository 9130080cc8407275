"""The order in which rows are dealt to workers: deterministic, and resumable from one integer."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


class RowOrder(Protocol):
    """Which rows a worker trains on. Pure: the same arguments always give the same rows."""

    def rows_for(self, step: int, micro: int, worker: int) -> list[int]:
        """Row ids of micro-batch `micro` of optimiser step `step` (from 0) of drafter `worker`."""
        ...


@dataclass(frozen=True)
class Schedule:
    """How one step's rows are dealt to workers."""

    workers: int
    accumulation: int
    batch_size: int

    @property
    def samples_per_step(self) -> int:
        """Rows that one optimiser step takes."""
        return self.workers * self.accumulation * self.batch_size

    def position(self, step: int, micro: int, worker: int) -> int:
        """Place of the first row of a micro-batch in the stream of rows."""
        return ((step * self.accumulation + micro) * self.workers + worker) * self.batch_size


class Sampler:
    """A new permutation of the rows each epoch, dealt out in order; its whole state is one position.

    Every row comes once an epoch, and the workers of a step never share a row while there are enough rows.
    `start` (a position) and `first_step` continue a stream exactly, also with another number of workers.
    """

    def __init__(
        self, rows: Sequence[int], seed: int, schedule: Schedule, *, start: int = 0, first_step: int = 0
    ) -> None:
        self._rows = tuple(rows)
        self._seed = seed
        self._schedule = schedule
        self._offset = start - first_step * schedule.samples_per_step
        self._epochs: dict[int, list[int]] = {}

    def _epoch(self, epoch: int) -> list[int]:
        known = self._epochs.get(epoch)
        if known is None:
            generator = torch.Generator().manual_seed(derive_seed(self._seed, "epoch", epoch))
            known = torch.randperm(len(self._rows), generator=generator).tolist()
            # a step may lie across two epochs; older ones never come back (a copy: several threads read)
            self._epochs = {key: value for key, value in self._epochs.items() if key >= epoch - 1} | {epoch: known}
        return known

    def rows_for(self, step: int, micro: int, worker: int) -> list[int]:
        """See `RowOrder`."""
        first = self._offset + self._schedule.position(step, micro, worker)
        picked = []
        for place in range(first, first + self._schedule.batch_size):
            epoch, index = divmod(place, len(self._rows))
            picked.append(self._rows[self._epoch(epoch)[index]])
        return picked

    def position_after(self, steps: int) -> int:
        """The position after `steps` optimiser steps of the whole run: what a checkpoint keeps."""
        return self._offset + steps * self._schedule.samples_per_step


class FixedOrder:
    """Given rows in the given order, over and over: the longest rows of the canary's rehearsal."""

    def __init__(self, rows: Sequence[int], schedule: Schedule) -> None:
        self._rows = tuple(rows)
        self._schedule = schedule

    def rows_for(self, step: int, micro: int, worker: int) -> list[int]:
        """See `RowOrder`."""
        first = self._schedule.position(step, micro, worker)
        return [self._rows[place % len(self._rows)] for place in range(first, first + self._schedule.batch_size)]


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed for one purpose, so that no two purposes share a stream of numbers."""
    digest = hashlib.sha256("/".join(str(part) for part in parts).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
