"""Does every worker get rows of its own? The run's own batch maker is asked for the first step; no target runs."""

from __future__ import annotations

import traceback
from collections.abc import Iterator

import torch
from torch import Tensor

from trainer.canary.evidence import Check, Evidence, Outcome
from trainer.data import Rows
from trainer.parts import Parts
from trainer.queues import Assignment


class _NoTarget:
    """Features of no width: what is asked is which rows, and their tokens."""

    @staticmethod
    def features_of(rows: Rows) -> Tensor:
        return torch.zeros((*rows.input_ids.shape, 0))


def judge_rows(parts: Parts, evidence: Evidence) -> None:
    """Add the check; `parts` must start from step 0, so that the first step lies in one epoch."""
    try:
        problem = next(_problems(parts), None)
    except Exception:
        # what cannot make a batch is what this looks for
        problem = traceback.format_exc().strip()
    outcome = Outcome.FAIL if problem else Outcome.PASS
    summary = (
        problem or f"{parts.schedule.samples_per_step} samples of the first step, no row of one worker in another's"
    )
    evidence.add(Check("rows", None, outcome, summary))


def _problems(parts: Parts) -> Iterator[str]:
    work, known = parts.settings.workload, set(parts.data.rows)
    taken: dict[int, int] = {}
    repeats = 0
    for worker in range(work.drafter_threads):
        for micro in range(work.accumulation):
            assignment = Assignment(step=0, micro=micro, worker=worker, index=micro)
            batch = parts.maker.make(assignment, _NoTarget(), torch.device("cpu"))
            if len(batch.row_ids) != work.batch_size:
                yield f"drafter {worker} gets {len(batch.row_ids)} rows a micro-batch, {work.batch_size} needed"
            for row in batch.row_ids:
                if row not in known:
                    yield f"drafter {worker} gets row {row}, which is held out or has no eligible anchor"
                repeats += row in taken
                if row in taken and len(taken) + repeats <= len(known):
                    yield f"drafter {worker} gets row {row} in the first step, and so does drafter {taken[row]}"
                taken.setdefault(row, worker)
