"""What the canary says of counted graphs. The counts are made up: where they come from is measured on a GPU."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("torch")

import torch

from trainer.canary.evidence import Evidence, Outcome
from trainer.canary.gate import GateRecord
from trainer.canary.leftover import Leftover
from trainer.canary.structure import judge_structure
from trainer.canary.witness import WorkerRecord
from trainer.compile import STRATEGIES, GraphCounts
from trainer.replica import DrafterReplica

pytestmark = pytest.mark.torch

STEPS = 3


def record(strategy: str, counts: list[GraphCounts], *, pools: int) -> GateRecord:
    """Two drafters on one GPU, three steps of one micro-batch."""
    work = SimpleNamespace(accumulation=1, drafter_threads=2, buckets=(32,), canary_steps=STEPS)
    parts = SimpleNamespace(
        strategy=STRATEGIES[strategy],
        settings=SimpleNamespace(workload=work),
        placement=SimpleNamespace(drafters=[torch.device("cuda", 0)] * 2),
    )
    return GateRecord(
        parts=cast("Any", parts),
        workers=[],
        compiles=[],
        steady_from=0,
        allocated=[{0: 1000}] * STEPS,
        graphs=counts,
        pools={0: pools},
        findings=[],
        steps_done=[STEPS, STEPS],
        failure=None,
        hung=[],
    )


def graphs(*, captures: int, replays: list[int], late: int = 0) -> list[GraphCounts]:
    done = [sum(replays[:count]) for count in range(len(replays) + 1)]
    return [GraphCounts({0: captures + (late if count else 0)}, {0: each}) for count, each in enumerate(done)]


def outcomes(tmp_path: Path, given: GateRecord) -> dict[str, Outcome]:
    evidence = Evidence(tmp_path)
    judge_structure(given, evidence)
    return {each.id: each.outcome for each in evidence.checks if each.id in ("cuda_graphs", "graph_pools")}


# forward and backward of the step, and the forward that shows the hidden states, of two workers
@pytest.mark.parametrize(("strategy", "replays"), [("reduce-overhead", 6), ("whole-step", 4)])
def test_replays_are_counted_exactly(tmp_path: Path, strategy: str, replays: int) -> None:
    right = graphs(captures=4, replays=[replays] * STEPS)
    assert outcomes(tmp_path, record(strategy, right, pools=2)) == {
        "cuda_graphs": Outcome.PASS,
        "graph_pools": Outcome.PASS,
    }
    for wrong in ([replays, replays - 1, replays], [replays, replays, replays + 1]):
        found = outcomes(tmp_path, record(strategy, graphs(captures=4, replays=wrong), pools=2))
        assert found["cuda_graphs"] is Outcome.FAIL
    late = graphs(captures=4, replays=[replays] * STEPS, late=1)
    assert outcomes(tmp_path, record(strategy, late, pools=2))["cuda_graphs"] is Outcome.FAIL


def test_a_pool_for_each_drafter(tmp_path: Path) -> None:
    right = graphs(captures=4, replays=[4] * STEPS)
    assert outcomes(tmp_path, record("whole-step", right, pools=1)) == {
        "cuda_graphs": Outcome.PASS,
        "graph_pools": Outcome.FAIL,
    }


def test_without_a_graph_there_are_no_pools_to_check(tmp_path: Path) -> None:
    none = graphs(captures=0, replays=[0] * STEPS)
    assert outcomes(tmp_path, record("whole-step", none, pools=0)) == {
        "cuda_graphs": Outcome.FAIL,
        "graph_pools": Outcome.NOT_CHECKED,
    }


@pytest.mark.parametrize("strategy", ["reduce-overhead", "whole-step"])
def test_a_replica_that_is_held_fails_also_where_the_compiler_keeps_graphs(strategy: str) -> None:
    given = record(strategy, graphs(captures=4, replays=[4] * STEPS), pools=2)
    drafter = torch.nn.Linear(1, 1)
    replica = DrafterReplica(cast("Any", drafter), cast("Any", None), cast("Any", None))
    given.workers.append(WorkerRecord([], replica))
    left = Leftover()
    left.follow(given)
    given.workers.clear()
    held = left.check()
    assert held.outcome is Outcome.FAIL
    assert held.summary.startswith("1 of the gate's 1 replicas, and 2 of their 2 parameters, are still held")
    del replica, drafter
    gone = left.check()
    assert gone.outcome is Outcome.PASS
    assert ("until the process ends" in gone.summary) == (strategy == "reduce-overhead")


@pytest.mark.parametrize("strategy", ["reduce-overhead", "whole-step"])
def test_bytes_that_do_not_come_back_are_a_warning_unless_the_compiler_keeps_them(
    strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # a CPU's allocator tells no figures
    held = {0: 1 << 20}
    monkeypatch.setattr("trainer.canary.leftover._allocated", lambda: dict(held))
    left = Leftover()
    left.follow(record(strategy, graphs(captures=4, replays=[4] * STEPS), pools=2))
    held[0] += 200 << 20
    found = left.check()
    assert found.outcome is (Outcome.PASS if strategy == "reduce-overhead" else Outcome.WARN)
    assert found.figures["cuda_0_bytes"] == 200 << 20
    held[0] -= 200 << 20
    assert left.check().outcome is Outcome.PASS
