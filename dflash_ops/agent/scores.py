"""How good the drafter was at a step, as the run's own metrics tell."""

from __future__ import annotations

import bisect
import json
import math
from array import array
from pathlib import Path
from typing import Any, Dict, Optional, Sequence

from .files import open_regular

_WINDOW = 20
"""Step records whose loss is averaged: a single step's is noise."""
_CHUNK = 4 * 1024 * 1024


class Scores:
    """Reads metrics.ndjson as it grows."""

    def __init__(self, metrics: Path) -> None:
        self._metrics = metrics
        self._offset = 0
        self._steps = array("q")
        self._losses = array("d")
        self._evaluations: Dict[int, Dict[str, Any]] = {}

    def read(self) -> None:
        """Everything that is new, whole lines only."""
        try:
            file = open_regular(self._metrics)
        except OSError:
            return
        with file:
            file.seek(self._offset)
            rest = b""
            while True:
                block = file.read(_CHUNK)
                if not block:
                    return
                *lines, rest = (rest + block).split(b"\n")
                for line in lines:
                    self._offset += len(line) + 1
                    self._take(line)

    def _take(self, line: bytes) -> None:
        try:
            record = json.loads(line)
        except ValueError:
            # cut by a kill or a full disk
            return
        step = record.get("step") if isinstance(record, dict) else None
        if not isinstance(step, int):
            return
        if record.get("kind") == "evaluation":
            self._evaluations[step] = record
        loss = _number(record.get("loss"))
        if record.get("kind") == "step" and loss is not None:
            # begun again at an earlier step: what came after it before is no more
            while self._steps and self._steps[-1] >= step:
                self._steps.pop()
                self._losses.pop()
            self._steps.append(step)
            self._losses.append(loss)

    def of(self, steps: Sequence[int]) -> Dict[int, float]:
        """A number for each of `steps` that something is known of; more is better, and all are of one kind.

        The kind is the best that *every* step has: held-out tau, else held-out loss, else the mean training loss of
        the last 20 step records up to it. The last of `steps` may lack the first two: it may be judged just now.
        """
        for key, sign in (("tau", 1.0), ("loss", -1.0)):
            values = {step: _number(self._evaluations.get(step, {}).get(key)) for step in steps}
            known = {step: sign * value for step, value in values.items() if value is not None}
            if known and all(step in known for step in steps[:-1]):
                return known
        means = {step: self._mean_loss(step) for step in steps}
        return {step: -mean for step, mean in means.items() if mean is not None}

    def _mean_loss(self, step: int) -> Optional[float]:
        end = bisect.bisect_right(self._steps, step)
        window = self._losses[max(0, end - _WINDOW) : end]
        return sum(window) / len(window) if window else None


def _number(value: Any) -> Optional[float]:
    known = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if known else None
