"""Inductor's kernels inside CUDA graphs, with CUDA graph trees: one memory pool for all graphs of a thread.

Only where this torch keeps the trees' state for each thread (2.13 and what has that change), and with one thread on a
GPU: the backward's graphs are still shared by all threads of a device.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence

import torch
from torch import _inductor as inductor

from trainer.compile.separate import SeparateStep
from trainer.compile.strategy import Step, Strategy


def _compile(function: Step) -> Step:
    options = {**inductor.list_mode_options("reduce-overhead"), "triton.cudagraph_trees": True}
    compiled: Step = torch.compile(function, fullgraph=True, dynamic=False, options=options)
    return compiled


def thread_safe_trees() -> bool:
    """Whether a thread that did not import the trees' module can use them: asked of such a thread."""
    from torch._inductor import cudagraph_trees

    if not hasattr(cudagraph_trees, "graph_capture_lock"):
        return False
    found: list[bool] = []

    def ask() -> None:
        try:
            cudagraph_trees.get_obj(cudagraph_trees.local, "tree_manager_containers")
        except (AssertionError, AttributeError, RuntimeError):
            return
        found.append(True)

    worker = threading.Thread(target=ask, name="trees-probe")
    worker.start()
    worker.join()
    return bool(found)


def _refusal(devices: Sequence[torch.device]) -> str | None:
    shared = [name for name, count in Counter(str(each) for each in devices).items() if count > 1]
    if shared and torch.device(shared[0]).type == "cuda":
        return f"two threads on {shared[0]} would share the graphs of the backward"
    if not thread_safe_trees():
        return f"torch {torch.__version__} has no thread-safe CUDA graph trees (2.13 and later have)"
    return None


STRATEGY = Strategy(
    "reduce-overhead-trees",
    _compile,
    SeparateStep,
    compiles=True,
    graphs=True,
    warm_up_calls=3,
    replays=lambda accumulation, _replicas: 2 * accumulation,
    replays_per_call=1,
    refusal=_refusal,
)
