"""Negative controls of the structure: the gate's own checks, given something that is broken on purpose.

A check that calls it good proves nothing, and the verdict is inconclusive. They take milliseconds. (The control of the
numbers, a gradient made wrong, is in `numbers`.)
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from trainer.canary.evidence import Check, Outcome
from trainer.canary.structure import own_code_objects, replays_by_step
from trainer.compile import CompileEvent, CompileLog, Gate, graph_counts, private_function
from trainer.errors import told_whole
from trainer.parts import Parts

_WORKERS = ("control-0", "control-1")


def run_controls(parts: Parts, gate: Gate) -> list[Check]:
    """Both controls; call it when no worker runs. One that raises is inconclusive: the numbers' verdict is kept.

    `gate`: one that nobody passes through.
    """
    found: list[Check] = []
    with _kept(found, "control_code_objects"):
        found.append(_shared_code(parts, gate))
    with _kept(found, "control_graphs"):
        found.append(_graphs_off(parts, gate))
    return found


@contextlib.contextmanager
def _kept(found: list[Check], name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        traceback.print_exc()
        why = f"the control itself failed: {told_whole(error)}"
        found.append(Check(name, None, Outcome.INCONCLUSIVE, why, broken=True))


def _shared_code(parts: Parts, gate: Gate) -> Check:
    """Two workers that run one code object, and two that run one each, through the check of code objects."""
    name = "control_code_objects"
    if not parts.strategy.compiles:
        why = f"strategy {parts.strategy.name} compiles nothing"
        return Check(name, None, Outcome.NOT_CHECKED, why)
    shared = private_function(_tiny, "control_shared")
    together = _compiles([shared, shared], gate)
    apart = _compiles([private_function(_tiny, f"control_private_{index}") for index in range(len(_WORKERS))], gate)
    noticed = min(own_code_objects(together, worker) for worker in _WORKERS) == 0
    cleared = min(own_code_objects(apart, worker) for worker in _WORKERS) == 1
    if noticed and cleared:
        return Check(name, None, Outcome.PASS, "two workers with one code object: noticed")
    said = (
        "private code objects are taken for shared ones" if noticed else "two workers with one code object: not noticed"
    )
    return Check(name, None, Outcome.INCONCLUSIVE, said)


def _tiny(weight: Tensor, value: Tensor) -> Tensor:
    return (weight * value).sum()


def _compiles(functions: Sequence[Callable[[Tensor, Tensor], Tensor]], gate: Gate) -> list[CompileEvent]:
    """Each worker compiles its function, Dynamo's part only, over weights of its own."""
    with CompileLog() as log:
        for worker, function in zip(_WORKERS, functions, strict=True):
            with gate.exclusive(worker):
                compiled = torch.compile(function, backend="eager", fullgraph=True, dynamic=False)
                compiled(torch.ones(2), torch.ones(2))
    return log.events


def _graphs_off(parts: Parts, gate: Gate) -> Check:
    """A kernel launched without a graph, and replayed in one, through the check of replays."""
    name = "control_graphs"
    devices = [each for each in parts.placement.drafters if parts.strategy.uses_graphs(each)]
    if not devices:
        why = "no drafter is on CUDA" if parts.strategy.graphs else f"strategy {parts.strategy.name} uses no graphs"
        return Check(name, None, Outcome.NOT_CHECKED, why)
    device, index = devices[0], devices[0].index or 0
    stream = torch.cuda.Stream(device)
    with torch.cuda.device(device), torch.cuda.stream(stream):
        # called once before: loading a kernel is no work for a capture
        value = torch.ones(8, device=device).mul_(2.0)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with gate.exclusive("control"):
            graph.capture_begin(capture_error_mode="thread_local")
            value.mul_(2.0)
            graph.capture_end()
        counts = [graph_counts()]
        value.mul_(2.0)
        counts.append(graph_counts())
        graph.replay()
        counts.append(graph_counts())
        stream.synchronize()
    without, replayed = replays_by_step(counts, index)
    noticed, cleared = without == 0, replayed == 1
    if noticed and cleared:
        return Check(name, None, Outcome.PASS, f"cuda:{index}: work without a graph: noticed")
    said = "a replayed graph is not counted" if noticed else "work without a graph counts as a replay"
    return Check(name, None, Outcome.INCONCLUSIVE, f"cuda:{index}: {said}")
