"""The canary's rehearsal: SIGTERM ends it with a checkpoint, and a GPU that is too small is told in words."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import Tensor

from trainer import stopping
from trainer import train_dflash_pipeline as pipeline
from trainer.canary.evidence import Evidence, Outcome
from trainer.canary.out_of_memory import explained
from trainer.canary.rehearsal import rehearse
from trainer.errors import WorkerFailed
from trainer.parts import load_parts
from trainer.settings import Settings, settings_from_json

pytestmark = pytest.mark.torch

# as torch 2.11 says it
FULL = (
    "CUDA out of memory. Tried to allocate 12.06 GiB. GPU 1 has a total capacity of 23.69 GiB of which 5.41 GiB is "
    "free. Including non-PyTorch memory, this process has 18.27 GiB memory in use. Of the allocated memory 17.50 GiB "
    "is allocated by PyTorch, and 251.27 MiB is reserved by PyTorch but unallocated."
)


@pytest.fixture
def small(make_settings: Any, prepared_folder: Path) -> Settings:
    """Two drafters; the training is as long as the rehearsal."""
    settings = make_settings(
        prepared=str(prepared_folder), rehearsal_steps=2, draft_layers=1, evaluation_prompts=1, steps=2
    )
    return settings_from_json(settings)


def rehearsed(settings: Settings, out: Path) -> dict[str, tuple[Outcome, str]]:
    evidence = Evidence(out)
    rehearse(settings, out / "rehearsal", evidence)
    return {check.id: (check.outcome, check.summary) for check in evidence.checks}


def test_sigterm_ends_it_after_its_steps_though_the_training_is_no_longer(small: Settings, tmp_path: Path) -> None:
    found = rehearsed(small, tmp_path)
    assert {name: outcome for name, (outcome, _) in found.items()} == {
        "rehearsal": Outcome.PASS,
        "sigterm": Outcome.PASS,
        "checkpoint": Outcome.PASS,
    }
    result = json.loads((tmp_path / "rehearsal" / "result.json").read_text())
    assert (result["outcome"], result["steps"]) == ("stopped", 2)
    records = [json.loads(line) for line in (tmp_path / "rehearsal" / "metrics.ndjson").read_text().splitlines()]
    assert [record["step"] for record in records if record["kind"] == "step"] == [1, 2]


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("exp_avg_sq.fc.weight", lambda each: each.nextafter(torch.ones(())), "is not in the file as it is in memory"),
        ("exp_avg.norm.weight", lambda each: each.double(), "is not in the file as it is in memory"),
        ("step.fc.weight", lambda each: each + 1, "the optimiser counts 3 updates of fc.weight after step 2"),
    ],
)
def test_a_checkpoint_that_is_not_what_is_in_memory(
    small: Settings,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    change: Callable[[Tensor], Tensor],
    said: str,
) -> None:
    def other(out: Path, step: int, weights: Any, config: Any, resume: Any) -> Path:
        return real(out, step, weights, config, {**resume, name: change(resume[name])})

    real = pipeline.save_checkpoint
    monkeypatch.setattr(pipeline, "save_checkpoint", other)
    outcome, summary = rehearsed(small, tmp_path)["checkpoint"]
    assert outcome is Outcome.FAIL and said in summary


def test_of_what_is_held_out_the_longest_is_judged(small: Settings) -> None:
    everything = load_parts(small).held_out
    assert len(everything) > 1
    (taken,) = load_parts(small, longest_first=True).held_out
    assert len(taken.prompt) + len(taken.answer) == max(len(each.prompt) + len(each.answer) for each in everything)


def test_a_run_that_is_deaf_to_sigterm_is_seen(
    small: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stopping, "_NOTICED_S", 0.01)
    monkeypatch.setattr(stopping.Term, "_note", lambda *_: None)
    found = rehearsed(small, tmp_path)
    assert found["sigterm"][0] is Outcome.FAIL
    assert found["sigterm"][1].startswith("SIGTERM in step 2: the run completed at step 3")
    assert found["rehearsal"][0] is Outcome.PASS


def test_a_worker_whose_gpu_is_too_small(small: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_given: object) -> None:
        raise torch.OutOfMemoryError(FULL)

    monkeypatch.setattr(pipeline, "build_replica", full)
    outcome, summary = rehearsed(small, tmp_path)["rehearsal"]
    assert outcome is Outcome.FAIL
    assert summary.startswith("cuda:1 ran out of memory in drafter-")
    assert summary.endswith(
        " (12.06 GiB were asked for, 5.41 GiB of 23.69 GiB were free): reduce the largest of workload.buckets (32), "
        "workload.anchors (4), workload.drafter_threads (2), or put target and drafters on different GPUs"
    )


def test_only_memory_is_explained_as_memory(small: Settings) -> None:
    wrapped = RuntimeError("backend failed")
    wrapped.__cause__ = torch.OutOfMemoryError(FULL)
    assert "cuda:1" in (explained(WorkerFailed("drafter-0", wrapped, ""), small) or "")
    # a library's own allocation, which names no GPU and no size
    cublas = RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
    assert (explained(cublas, small) or "").startswith("a GPU ran out of memory: reduce ")
    assert explained(RuntimeError("CUDA error: an illegal memory access was encountered"), small) is None
    assert explained(ValueError("out of memory"), small) is None
