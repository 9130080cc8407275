"""What a run's metrics say of its two sides."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

_NAMES = ("samples_per_s", "target_tokens_per_s", "drafter_wait", "drafter_busy", "target_wait", "target_busy")


def pipeline_medians(out: Path) -> dict[str, float]:
    """Medians of the later half of the logged steps: rates, and each side's share of its time spent waiting."""
    lines = [json.loads(line) for line in (out / "metrics.ndjson").read_text().splitlines()]
    steps = [each["pipeline"] for each in lines if each["kind"] == "step"]
    later = steps[len(steps) // 2 :]
    return {name: round(statistics.median(each[name] for each in later), 4) for name in _NAMES}
