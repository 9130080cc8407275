"""Signs of life, and of sickness, of a run that nobody looks at: both are read from its metrics.

What counts as life is a metrics record, nothing else: a trainer that hangs may well go on printing (a progress bar, a
warning of a library, a thread that waits and says so), but it makes no step. Before the first step there is its own,
longer time: loading a target, evaluating it and compiling take long, and nothing is recorded meanwhile. After the last
step that time counts again: the closing evaluation decodes one token after another.
"""

from __future__ import annotations

import json
import math
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

from .files import open_regular

STALLED = "stalled"
NON_FINITE = "non_finite"

_CHUNK = 256 * 1024
_LINE_LIMIT = 4 * 1024 * 1024
"""No record is longer; what is, is read over."""


@dataclass(frozen=True)
class Trouble:
    """Why a run is ended. `step`: its last step, or the one whose loss is none; `record`: that step's record;
    `at_work`: of a stall, the step and samples that each worker had begun, where the trainer says;
    `good_step`: the last recorded one before it whose loss and gradient norm are finite, None: there is none;
    `good_checkpoint`: path of the newest checkpoint that is not younger, filled in at the end."""

    kind: str
    what: str
    step: Optional[int] = None
    seconds: Optional[float] = None
    record: Optional[Dict[str, Any]] = None
    at_work: Optional[List[Dict[str, Any]]] = None
    good_step: Optional[int] = None
    good_checkpoint: Optional[str] = None

    def to_json(self) -> Dict[str, Any]:
        return asdict(self)


def plain(value: Any) -> Any:
    """The same in strict JSON: NaN and the infinities become their names."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    return value


class Watch:
    """Reads what was added since the last look. Whole lines only; damaged ones say nothing.

    `stall_s`: seconds without a record between the first step and the last, which is number `last_step` where that is
    known; `first_step_s`: before and after them; 0 is never. `clock` counts seconds and is never set: the wall clock
    may jump, and a machine that slept has not stalled.
    """

    def __init__(
        self,
        metrics: Path,
        *,
        stall_s: float,
        first_step_s: float,
        last_step: Optional[int] = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._metrics = metrics
        self._last_step = last_step
        self._stall_s = stall_s
        self._first_step_s = first_step_s
        self._clock = clock
        self._life = clock()
        self._offset = 0
        self._rest = b""
        self._step: Optional[int] = None
        self._reached = 0
        self.good_step: Optional[int] = None
        """The last recorded step whose loss and gradient norm are finite: so were the weights after it."""

    def look(self) -> Optional[Trouble]:
        """What is wrong now."""
        return self.sickness() or self._stall()

    def excuse(self, seconds: float) -> None:
        """Time in which nobody looked: whoever looks was frozen, and the run most likely with it."""
        self._life += seconds

    def sickness(self) -> Optional[Trouble]:
        """The first new step whose loss or gradient norm is not finite."""
        for record in self._records():
            self._life = self._clock()
            at = record.get("step")
            # the last step itself may go unrecorded (`log_every`), its checkpoint does not
            self._reached = at if isinstance(at, int) else self._reached
            if record["kind"] != "step":
                continue
            self._step = at if isinstance(at, int) else self._step
            for key in ("loss", "grad_norm"):
                value = plain(record.get(key))
                if isinstance(value, str) or (key == "loss" and key in record and value is None):
                    said = "null" if value is None else value
                    what = f"{key} is {said} at step {record.get('step')}"
                    return Trouble(NON_FINITE, what, self._step, record=plain(record), good_step=self.good_step)
            self.good_step = self._step
        return None

    def _stall(self) -> Optional[Trouble]:
        patience, name = self._patience()
        silent = self._clock() - self._life
        if not patience or silent < patience:
            return None
        after = "before the first step" if self._step is None else f"after step {self._step}"
        what = f"no metrics record for {silent:.0f} s {after} ({name} is {patience:g})"
        return Trouble(STALLED, what, self._step, round(silent, 1), at_work=self._at_work() or None)

    def _at_work(self) -> List[Dict[str, Any]]:
        """What each worker wrote before its step; a line that is not whole says nothing."""
        try:
            with open_regular(self._metrics.with_name("at_work.ndjson")) as file:
                lines = file.read(_CHUNK).splitlines()
        except OSError:
            return []
        found = (_object(line) for line in lines)
        return [each for each in found if each is not None and isinstance(each.get("samples"), list)]

    def _patience(self) -> Tuple[float, str]:
        trains = self._step is not None and (self._last_step is None or self._reached < self._last_step)
        return (self._stall_s, "stall_s") if trains else (self._first_step_s, "first_step_s")

    def _records(self) -> Iterator[Dict[str, Any]]:
        for line in self._lines():
            record = _object(line)
            if record is not None and isinstance(record.get("kind"), str):
                yield record

    def _lines(self) -> Iterator[bytes]:
        try:
            file = open_regular(self._metrics)
        except OSError:
            return
        with file:
            if os.fstat(file.fileno()).st_size < self._offset:
                # replaced: another file to its reader
                self._offset, self._rest = 0, b""
            file.seek(self._offset)
            while block := file.read(_CHUNK):
                self._offset += len(block)
                *lines, self._rest = (self._rest + block).split(b"\n")
                if len(self._rest) > _LINE_LIMIT:
                    self._rest = b""
                yield from lines


def _object(line: bytes) -> Optional[Dict[str, Any]]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
