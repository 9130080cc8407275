"""Faults at places drawn from a seed; after each the invariants hold and the next command works.

Here 30 runs with fixed seeds: each way with a deploy, a follow, a stop and a collect, each fault on one way at least.
`FAULT_RUNS=200` runs that many others from number `FAULT_FIRST` on (nightly: `make faults`): every fault on every way
that has it. `FAULT_SEED=...` runs the one that a failure names.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest

from tests.faults.cases import Fault, dealt, draw
from tests.faults.harness import run_seed
from tests.faults.sites import Ground

IN_CI = (
    "1:local:AGENT:DEPLOY",
    "0:local:SUPERVISOR:DEPLOY",
    "0:local:PUMP:FOLLOW",
    "0:local:JOB:STOP",
    "0:local:CLIENT:COLLECT",
    "1:local:CLOCK:DEPLOY",
    "0:local:FULL:DEPLOY",
    "3:ssh:CUT:DEPLOY",
    "4:ssh:STALL:FOLLOW",
    "0:ssh:DELAY:COLLECT",
    "0:ssh:AGENT:DEPLOY",
    "2:ssh:SUPERVISOR:STOP",
    "4:ssh:CLIENT:DEPLOY",
    "3:ssh:SSHD:DEPLOY",
    "1:ssh:JOB:DEPLOY",
    "0:pct-stream:CUT:COLLECT",
    "3:pct-stream:STALL:DEPLOY",
    "1:pct-stream:AGENT:DEPLOY",
    "0:pct-stream:PUMP:DEPLOY",
    "1:pct-stream:CLIENT:FOLLOW",
    "0:pct-stream:CLOCK:STOP",
    "3:pct-stream:CONTAINER:DEPLOY",
    "1:pct-stream:JOB:DEPLOY",
    "0:pct-push:CUT:DEPLOY",
    "0:pct-push:DELAY:STOP",
    "0:pct-push:AGENT:DEPLOY",
    "2:pct-push:CLIENT:DEPLOY",
    "0:pct-push:FULL:DEPLOY",
    "0:pct-push:SSHD:FOLLOW",
    "0:pct-push:CONTAINER:COLLECT",
)
"""What of all there is they meet: test_drawing.py."""


def _seeds() -> Sequence[str]:
    if one := os.environ.get("FAULT_SEED"):
        return (one,)
    if many := os.environ.get("FAULT_RUNS"):
        first = int(os.environ.get("FAULT_FIRST", "0"))
        return [dealt(number) for number in range(first, first + int(many))]
    return IN_CI


def _params() -> list[object]:
    return [pytest.param(seed, marks=[] if draw(seed).way == "local" else [pytest.mark.rig]) for seed in _seeds()]


@pytest.mark.parametrize("seed", _params())
def test_a_fault(ground: Ground, seed: str) -> None:
    if draw(seed).fault is Fault.FULL and os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    print(run_seed(ground, seed))
