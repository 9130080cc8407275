"""Rows that cannot be used: counted and named by reason, never dropped in silence."""

from __future__ import annotations

import logging

from trainer.data import named_rows
from trainer.errors import InputError, TrainerError

MALFORMED, TOO_LONG, MASK_TOKEN = "malformed", "too_long", "mask_token"
TEMPLATE, HISTORY, EMPTY_ANSWER, NOT_EXACT = "template", "history", "empty_answer", "not_exact"
_MEANING = {
    MALFORMED: "no JSON, no prompt in it, or messages that are none",
    TOO_LONG: "no two tokens of an answer fit the largest of workload.buckets beside the prompt",
    MASK_TOKEN: "workload.mask_token occurs in prompt or answer",
    TEMPLATE: "the target's chat template refuses it",
    HISTORY: "the chat template renders earlier turns otherwise than they were written",
    EMPTY_ANSWER: "nothing is answered",
    NOT_EXACT: "the endpoint gives no token ids, and its text does not become the same text again",
}

log = logging.getLogger(__name__)


class BadRow(TrainerError):  # noqa: N818 -- reads as the fact it reports
    """A row cannot be used; `reason` is one of the names above."""

    def __init__(self, reason: str, what: str = "") -> None:
        super().__init__(what or _MEANING[reason])
        self.reason = reason


class BadRows:
    """What was left out. `unit` is what the numbers count: lines of a file, rows of a dataset."""

    def __init__(self, unit: str, allowed: int) -> None:
        self._unit = unit
        self._allowed = allowed
        self._rows: dict[str, list[int]] = {}

    def add(self, row: int, reason: str) -> None:
        """Leave a row out."""
        self._rows.setdefault(reason, []).append(row)

    def __len__(self) -> int:
        return sum(len(rows) for rows in self._rows.values())

    def refuse_too_many(self) -> None:
        """Raise `InputError` where more are bad than `training.bad_prompts` allows."""
        if len(self) > self._allowed:
            raise InputError(
                f"{len(self)} {self._unit}s cannot be used: {'; '.join(self._told())}",
                "training.bad_prompts",
                f"correct them, or give {len(self)} to leave them out (the answers that are there are kept)",
            )

    def tell(self) -> None:
        """Name them in the log."""
        for line in self._told():
            log.warning("left out: %s", line)

    def to_json(self) -> dict[str, dict[str, object]]:
        """Count and numbers of all of them by reason, for `prepare.json`."""
        return {reason: {"count": len(rows), f"{self._unit}s": sorted(rows)} for reason, rows in self._sorted()}

    def _sorted(self) -> list[tuple[str, list[int]]]:
        return sorted(self._rows.items())

    def _told(self) -> list[str]:
        return [
            f"{reason} ({_MEANING[reason]}): {self._unit}s {named_rows(sorted(rows))}"
            for reason, rows in self._sorted()
        ]
