"""A GPU that is too small for the workload, in words: where, how much was asked for, what to reduce."""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch

from trainer.errors import WorkerFailed
from trainer.settings import Settings

# torch's allocator; a library's own allocation (cuBLAS, a graph's) says less
_ASKED = re.compile(r"Tried to allocate ([\d.]+ \w+)")
_GPU = re.compile(r"GPU (\d+) has a total capacity of ([\d.]+ \w+) of which ([\d.]+ \w+) is free")
_OTHERS = re.compile(r"out of memory|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED")


def explained(error: BaseException, settings: Settings) -> str | None:
    """What to say of a device that ran out of memory; None for any other error."""
    found = next((each for each in _causes(error) if _is_out_of_memory(each)), None)
    if found is None:
        return None
    text, work = str(found), settings.workload
    asked, gpu = _ASKED.search(text), _GPU.search(text)
    where = f"cuda:{gpu[1]}" if gpu else "a GPU"
    who = f" in {error.worker}" if isinstance(error, WorkerFailed) else ""
    sizes = []
    if asked:
        sizes.append(f"{asked[1]} were asked for")
    if gpu:
        sizes.append(f"{gpu[3]} of {gpu[2]} were free")
    told = f" ({', '.join(sizes)})" if sizes else ""
    smaller = [f"workload.{name} ({value})" for name, value in (("batch_size", work.batch_size),) if value > 1]
    smaller += [f"the largest of workload.buckets ({work.buckets[-1]})", f"workload.anchors ({work.anchors})"]
    if work.drafter_threads > 1:
        smaller.append(f"workload.drafter_threads ({work.drafter_threads})")
    smaller.append("or put target and drafters on different GPUs")
    return f"{where} ran out of memory{who}{told}: reduce {', '.join(smaller)}"


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error and what it came from, the outermost first."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and _OTHERS.search(str(error)) is not None
