"""What really happened: CUDA graph captures and replays by device, and compiles by thread and gate."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch._dynamo import callback as dynamo_callback

from trainer.compile.gate import gate_holder

_lock = threading.Lock()
_captures: Counter[int] = Counter()
_replays: Counter[int] = Counter()
_installed = False


@dataclass(frozen=True)
class GraphCounts:
    """Captures and replays so far, by CUDA device index.

    By device, since the backward's replays may come from autograd's thread.
    """

    captures: dict[int, int]
    replays: dict[int, int]


def _count(name: str, counter: Counter[int]) -> None:
    original = getattr(torch.cuda.CUDAGraph, name)

    def counted(graph: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(graph, *args, **kwargs)
        with _lock:
            counter[torch.cuda.current_device()] += 1
        return result

    setattr(torch.cuda.CUDAGraph, name, counted)


def graph_counts() -> GraphCounts:
    """The counts since the first call, which starts the counting (wrapping torch.cuda.CUDAGraph at class level)."""
    global _installed
    with _lock:
        first, _installed = not _installed, True
    if first and torch.cuda.is_available():
        _count("capture_end", _captures)
        _count("replay", _replays)
    with _lock:
        return GraphCounts(dict(_captures), dict(_replays))


@dataclass(frozen=True)
class CompileEvent:
    """One start of a compile: what for (DYNAMO, LAZY_BACKWARD, ...), in which thread, and who held the gate."""

    trigger: str
    compile_id: str
    thread: str
    holder: str | None


class CompileLog:
    """Records every compile that starts while the block runs. A compile whose `holder` is None ran outside the gate."""

    def __init__(self) -> None:
        self.events: list[CompileEvent] = []

    def _record(self, args: Any) -> None:
        # Dynamo calls this under a lock of its own
        self.events.append(
            CompileEvent(
                args.callback_trigger.name, str(args.compile_id), threading.current_thread().name, gate_holder()
            )
        )

    def __enter__(self) -> CompileLog:
        dynamo_callback.callback_handler.register_start_callback(self._record)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        dynamo_callback.callback_handler.remove_start_callback(self._record)
