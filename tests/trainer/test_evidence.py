"""One outcome over all of the canary's findings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

from trainer.canary.evidence import Check, Evidence, Outcome

pytestmark = pytest.mark.torch


def written(out: Path, *found: tuple[str, Outcome]) -> tuple[int, str, str]:
    """Exit code, outcome and summary of these checks."""
    out.mkdir()
    evidence = Evidence(out)
    for name, outcome in found:
        evidence.add(Check(name, None, outcome, f"{name} it is"))
    code = evidence.write("proven")
    value = json.loads((out / "evidence.json").read_text())
    return code, value["outcome"], value["summary"]


def test_a_warning_passes_and_is_named(tmp_path: Path) -> None:
    found = ("moved", Outcome.PASS), ("throughput", Outcome.WARN), ("health", Outcome.WARN)
    assert written(tmp_path / "out", *found) == (0, "pass", "proven; warned: health, throughput")


def test_what_is_worse_than_a_warning_decides(tmp_path: Path) -> None:
    warned = ("throughput", Outcome.WARN)
    assert written(tmp_path / "a", warned, ("moved", Outcome.FAIL)) == (6, "fail", "moved: moved it is")
    found = written(tmp_path / "b", warned, ("negative_control", Outcome.INCONCLUSIVE))
    assert found == (7, "inconclusive", "negative_control: negative_control it is")


def test_nothing_checked_is_nothing_proven(tmp_path: Path) -> None:
    assert written(tmp_path / "out", ("memory", Outcome.NOT_CHECKED))[0] == 7


@pytest.mark.parametrize(
    ("others", "again"),
    [
        ([], True),
        ([Check("gradients", 0, Outcome.PASS, "right")], True),
        ([Check("reference", None, Outcome.INCONCLUSIVE, "no room")], False),
        ([Check("gradients", 0, Outcome.FAIL, "wrong")], False),
    ],
)
def test_only_a_broken_check_asks_for_another_process(tmp_path: Path, others: list[Check], again: bool) -> None:
    evidence = Evidence(tmp_path)
    for check in (*others, Check("control_graphs", None, Outcome.INCONCLUSIVE, "it raised", broken=True)):
        evidence.add(check)
    evidence.write("proven")
    found = json.loads((tmp_path / "evidence.json").read_text())
    assert found.get("again") == ("control_graphs: it raised" if again else None)
