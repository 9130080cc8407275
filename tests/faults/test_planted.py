"""Bugs planted on purpose in a copy of dflash_ops: the harness finds each of them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.faults.cases import FILE, Case, Fault, Place, Scenario
from tests.faults.clock import FILE as CLOCK
from tests.faults.harness import Broken, NotReached, run_case
from tests.faults.link import Direction
from tests.faults.sites import Ground
from tests.typist import ROOT, Typist

PLANTED = Path(__file__).with_name("planted")
TRIES = 4


def case(scenario: Scenario, fault: Fault, event: str, nth: int = 1, pause_s: float = 0.0) -> Case:
    place = Place(event, nth, 0, Direction.DOWN, pause_s)
    return Case("planted", "local", scenario, fault, place, proven=False, jump_s=0)


@pytest.mark.parametrize(
    ("bug", "case", "found"),
    [
        (
            "log-cursor-off-by-one",
            case(Scenario.FOLLOW, Fault.AGENT, "log", 3, pause_s=0.5),
            "was shown as",
        ),
        (
            "renamed-before-verified",
            case(Scenario.DEPLOY, Fault.AGENT, f"{FILE}releases/{'[0-9a-f]' * 64}"),
            "release [0-9a-f]+.*(is missing|no whole manifest)",
        ),
        (
            "lock-not-released",
            case(Scenario.DEPLOY, Fault.CLIENT, "asking"),
            "the lock was not let go",
        ),
    ],
)
def test_a_planted_bug_is_found(tmp_path: Path, bug: str, case: Case, found: str) -> None:
    shutil.copytree(ROOT / "dflash_ops", tmp_path / "dflash_ops", ignore=shutil.ignore_patterns("__pycache__"))
    applied = subprocess.run(
        ["git", "apply", str(PLANTED / f"{bug}.patch")],
        cwd=tmp_path,
        env={**os.environ, "GIT_CEILING_DIRECTORIES": str(tmp_path.parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert applied.returncode == 0, f"the code has changed, plant the bug anew: {applied.stderr}"
    (tmp_path / "dflash_ops" / "_bundled").mkdir()
    for bundled in ("hosts", "playbooks", "trainer"):
        (tmp_path / "dflash_ops" / "_bundled" / bundled).symlink_to(ROOT / bundled)
    folder = tmp_path / "faults"
    folder.mkdir()
    with Typist(tmp_path, clock=CLOCK) as typist:
        ground = Ground(folder, typist, _no_rig)
        problems = _problems(ground, case)
    assert any(re.search(found, problem) for problem in problems), problems


def _problems(ground: Ground, case: Case) -> tuple[str, ...]:
    for _ in range(TRIES):
        try:
            run_case(ground, case)
        except NotReached:
            continue
        except Broken as broken:
            return broken.problems
    return ()


def _no_rig() -> None:
    raise AssertionError("these bugs are found on this machine alone")
