"""Which side of a trainer holds the other up, as its step records tell (docs/trainer-contract.md, `pipeline`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

_KEYS = ("seconds", "samples_per_s", "target_tokens_per_s", "drafter_wait", "target_wait")
_LARGEST = 1e18
_WORTH_SAYING = 0.1
"""A side that waits less is as good as always at work."""


def bottleneck(steps: Iterable[Mapping[str, Any]]) -> str | None:
    """One line over these step records, each weighed by its time; None where none of them tells.

    The records come from a host: what is no figure is as if it were not there.
    """
    told = [each for step in steps if (each := _figures(step.get("pipeline"))) is not None]
    seconds = sum(each["seconds"] for each in told)
    if not seconds:
        return None
    mean = {key: sum(each[key] * each["seconds"] for each in told) / seconds for key in _KEYS[1:]}
    drafters, targets = mean["drafter_wait"], mean["target_wait"]
    speed = f"{mean['samples_per_s']:.2f} samples/s"
    if max(drafters, targets) < _WORTH_SAYING:
        return (
            f"{speed}; drafters wait {drafters:.0%} of the time, target workers {targets:.0%}: "
            "neither holds the other up"
        )
    if drafters > targets:
        return (
            f"{speed}; drafters wait {drafters:.0%} of the time: the target is the bottleneck "
            f"({mean['target_tokens_per_s']:,.0f} tokens/s); more target_workers, or GPUs of their own, may help"
        )
    return (
        f"{speed}; target workers wait {targets:.0%} of the time: the drafters are the bottleneck, which is as it "
        "should be; more drafter_threads may help where there is a GPU for them"
    )


def _figures(value: object) -> dict[str, float] | None:
    found = {key: value.get(key) for key in _KEYS} if isinstance(value, dict) else {}
    good = {
        key: float(each)
        for key, each in found.items()
        if isinstance(each, int | float) and not isinstance(each, bool) and 0 <= each < _LARGEST
    }
    return good if len(good) == len(_KEYS) else None
