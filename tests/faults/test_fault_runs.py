"""Faults at places drawn from a seed; after each the invariants hold and the next command works.

Here 30 runs with fixed seeds: every way, every fault. `FAULT_RUNS=200` runs that many others from seed `FAULT_FIRST` on
(nightly: `make faults`), `FAULT_SEED=...` the one that a failure names.
"""

from __future__ import annotations

import itertools
import os

import pytest

from tests.faults.cases import Fault, draw
from tests.faults.harness import run_seed
from tests.faults.sites import WAYS, Ground

IN_CI = (
    "7:local:AGENT",
    "11:local:AGENT",
    "0:local:SUPERVISOR",
    "5:local:SUPERVISOR",
    "3:local:PUMP",
    "1:local:JOB",
    "8:local:CLIENT",
    "12:local:CLIENT",
    "13:local:FULL",
    "7:local:FULL",
    "3:ssh:CUT",
    "10:ssh:CUT",
    "8:ssh:STALL",
    "4:ssh:STALL",
    "6:ssh:DELAY",
    "7:ssh:AGENT",
    "3:ssh:CLIENT",
    "12:ssh:SSHD",
    "2:pct-stream:SUPERVISOR",
    "8:pct-stream:JOB",
    "9:pct-stream:STALL",
    "2:pct-stream:AGENT",
    "2:pct-stream:CLOCK",
    "0:pct-stream:CONTAINER",
    "7:pct-stream:CONTAINER",
    "10:pct-stream:FULL",
    "58:pct-push:CUT",
    "9:pct-push:AGENT",
    "3:pct-push:CLIENT",
    "6:pct-push:FULL",
)
"""Chosen so that every fault, scenario and part of a deploy is met."""


def _seeds() -> list[tuple[str, str]]:
    """(seed, way)"""
    if one := os.environ.get("FAULT_SEED"):
        return [(one, draw(one).way)]
    if many := os.environ.get("FAULT_RUNS"):
        first = int(os.environ.get("FAULT_FIRST", "0"))
        numbers = range(first, first + int(many))
        return [(f"{number}:{way}", way) for number, way in zip(numbers, itertools.cycle(WAYS))]
    return [(seed, draw(seed).way) for seed in IN_CI]


def _params() -> list[object]:
    return [pytest.param(seed, marks=[] if way == "local" else [pytest.mark.rig]) for seed, way in _seeds()]


@pytest.mark.parametrize("seed", _params())
def test_a_fault(ground: Ground, seed: str) -> None:
    if draw(seed).fault is Fault.FULL and os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    print(run_seed(ground, seed))
