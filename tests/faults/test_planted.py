"""Bugs planted on purpose in a copy of dflash_ops: runs that are drawn find each of them."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.faults.cases import PLACES, STAGED, Case, Fault, Scenario, draw
from tests.faults.clock import FILE as CLOCK
from tests.faults.harness import Broken, NotReached, run_case
from tests.faults.sites import Ground
from tests.typist import ROOT, Typist

PLANTED = Path(__file__).with_name("planted")
RUNS = 6


@dataclass(frozen=True)
class Bug:
    """What is planted (`planted/NAME.patch`), the kind of runs that it shows in, and what the harness then says.

    A rename that comes too early shows only in a run that ends between it and what it should have waited for: of such
    runs those are taken whose drawn place is the release under its final name.
    """

    name: str
    fault: Fault
    scenario: Scenario
    places: tuple[str, ...]
    found: str


BUGS = (
    Bug("log-cursor-off-by-one", Fault.AGENT, Scenario.FOLLOW, PLACES[Scenario.FOLLOW], "was shown as"),
    Bug(
        "renamed-before-verified",
        Fault.AGENT,
        Scenario.DEPLOY,
        (STAGED,),
        "release [0-9a-f]+.*(is missing|no whole manifest)",
    ),
    Bug("lock-not-released", Fault.CLIENT, Scenario.DEPLOY, PLACES[Scenario.DEPLOY], "the lock was not let go"),
)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_drawn_runs_find_a_planted_bug(tmp_path: Path, bug: Bug) -> None:
    shutil.copytree(ROOT / "dflash_ops", tmp_path / "dflash_ops", ignore=shutil.ignore_patterns("__pycache__"))
    applied = subprocess.run(
        ["git", "apply", str(PLANTED / f"{bug.name}.patch")],
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
        problems = list(_found_by(ground, _drawn(bug)))
    assert any(re.search(bug.found, problem) for problem in problems), problems


def _drawn(bug: Bug) -> Iterator[Case]:
    """The first runs of that kind that the seeds draw."""
    cases = (draw(f"{number}:local:{bug.fault.name}:{bug.scenario.name}") for number in itertools.count())
    return itertools.islice((case for case in cases if case.place.event in bug.places), RUNS)


def _found_by(ground: Ground, cases: Iterator[Case]) -> Iterator[str]:
    """What did not hold in the first of them in which something did not."""
    for case in cases:
        try:
            run_case(ground, case)
        except NotReached:
            continue
        except Broken as broken:
            yield from broken.problems
            return


def _no_rig() -> None:
    raise AssertionError("these bugs are found on this machine alone")
